"""Thirty fixed conversations: few and many turns, tools, reasoning, white space, other scripts."""


def system(content):
    return {"role": "system", "content": content}


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def tool(content, number=0):
    return {"role": "tool", "content": content, "name": "add", "tool_call_id": f"call0000{number}"}


def calling(*arguments, content=""):
    calls = [
        {"id": f"call0000{number}", "type": "function", "function": {"name": "add", "arguments": given}}
        for number, given in enumerate(arguments)
    ]
    return assistant(content, tool_calls=calls)


def thinking(reasoning, content, **more):
    return assistant(content, reasoning_content=reasoning, **more)


Q, A = user("the cat and the hat?"), assistant("a dog.")
MORE = [user("and the end?"), assistant("the end, and a cat.")]
ASKED = [Q, calling({"a": 1}), tool("42")]

PLAIN = {
    "one answer": [Q, A],
    "two answers": [Q, A, *MORE],
    "four answers": [Q, A, *MORE] * 2,
    "a system message": [system("be brief"), Q, A],
    "a system message and two answers": [system("be brief"), Q, A, *MORE],
    "a question at the end": [Q, A, user("and?")],
    "spaces at the ends": [user("  the cat "), assistant(" a dog. "), user("and"), assistant("the hat  ")],
    "lines": [user("the cat\nand\n\nthe hat\n"), assistant("\n\na dog.\n\nthe end\n")],
    "other scripts": [user("猫と帽子 🎩?"), assistant("собака 🐕, é")],
    "special tokens as text": [user("<|im_end|> and </s>"), assistant("<|im_start|>assistant\nthe <|eot_id|> hat")],
    "braces": [user("{{ messages }} {% raw %}"), assistant("{% endgeneration %} {{ 1 }}")],
    "one letter": [user("a"), assistant("b")],
    "numbers": [user("1 + 1"), assistant("2"), user("2 + 2"), assistant("4")],
    "the same answer twice": [Q, A, Q, A],
    "the question as the answer": [user("a dog."), A],
    "a long answer": [Q, assistant("the cat and the hat, a dog " * 40)],
    "an answer that begins as a prompt does": [Q, assistant("<"), Q, assistant("\n<think")],
}
REASONING = {
    "reasoning": [Q, thinking("a cat, so", "a dog.")],
    "reasoning of two turns": [Q, thinking("a cat, so", "a dog."), MORE[0], thinking("the hat", "the end")],
    "reasoning of the last turn": [Q, A, MORE[0], thinking("the hat", "the end")],
    "reasoning of the first turn": [Q, thinking("a cat, so", "a dog."), *MORE],
    "reasoning in the content": [Q, assistant("<think>\na cat, so\n</think>\n\na dog."), *MORE],
    "a system message and reasoning": [system("be brief"), Q, thinking("a cat\n\nand\n", "a dog.")],
}
TOOLS = {
    "a call": [*ASKED, A],
    "a call and a question": [*ASKED, A, *MORE],
    "a call with words": [Q, calling({"a": 1}, content="the hat:"), tool("42"), A],
    "a call at the end": [Q, calling({"a": 1, "b": "the cat"})],
    "two calls in turn": [*ASKED, calling({"a": 42}), tool("43"), A],
    "two calls at once": [Q, calling({"a": 1}, {"a": 2}), tool("42"), tool("43", 1), A],
    "a call after an answer": [Q, A, *ASKED, A],
}
CONVERSATIONS = PLAIN | REASONING | TOOLS
assert len(CONVERSATIONS) == 30
