"""A plan in one line that a person can judge."""

from torchtitan_magi.planning.plan import AttnPlan


def describe_plan(plan: AttnPlan) -> str:
    """Tokens per rank, balance of the work, and K/V rows received against an all-gather."""
    work = plan.work.local_pairs + plan.work.remote_pairs  # tiles that are not full included
    balance = work.max() / work.mean() if work.any() else 1.0
    line = (
        f"Plan: {plan.tokens_per_rank:,} tokens on each of {plan.cp_size} ranks, heaviest rank {balance:.3f} x the mean"
    )
    all_gather = plan.padded_tokens - plan.tokens_per_rank
    if all_gather == 0:
        return line
    received = plan.received_rows
    return (
        f"{line}, K/V received {received.mean():,.0f} rows per rank (at most {received.max():,}; "
        f"{received.mean() / all_gather:.0%} of an all-gather)"
    )
