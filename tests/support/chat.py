"""A small byte-level tokenizer, chat templates of several kinds, and what a document's loss is on."""

from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from torchtitan_magi.data import ChatTokenizer
from torchtitan_magi.data.tokens.chat import CHATML_TEMPLATE

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
LLAMA3_TEMPLATE = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' +"
    " message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# the same text as CHATML_TEMPLATE without generation markers
CHATML_UNMARKED = (
    "{{ bos_token }}{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content +"
    " '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# what ends a turn of the assistant
TURN_ENDS = {CHATML_TEMPLATE: "<|im_end|>\n", CHATML_UNMARKED: "<|im_end|>\n", LLAMA3_TEMPLATE: "<|eot_id|>"}
TOOL = {"role": "tool", "content": "42"}
TEXTS = ["the cat and the hat,  a dog   and\n\n the end. assistant: user:"] * 3


def byte_level_tokenizer(special=SPECIAL, trim_offsets=None, vocab_size=400, texts=TEXTS) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    if trim_offsets is not None:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    return tokenizer


TOKENIZER = byte_level_tokenizer()
texts = st.one_of(st.text(max_size=12), st.text(alphabet=" \nthe catdog🎩é", max_size=20))
texts = texts.filter(lambda text: not {"\ufdd0", "\ufdd1"} & set(text))


def chat(template, tokenizer=TOKENIZER, bos=0, eos=1, day=None) -> ChatTokenizer:
    return ChatTokenizer(tokenizer, bos, eos, template, day)


def learned(document, tokenizer=TOKENIZER) -> str:
    return tokenizer.decode(document.tokens[document.loss_mask].tolist(), skip_special_tokens=False)
