"""Dense attention from a boolean mask, and the error budget against float64."""

import torch


def dense_attention(q, k, v, mask, softmax_scale, softcap=0.0, sinks=None):
    """out [T, Hq, D], lse [T, Hq] in the dtype of q; mask bool [T, Tk]. Rows that see nothing: out 0, lse -inf."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * softmax_scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    probs = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return torch.einsum("hqk,khd->qhd", probs, v), lse.transpose(0, 1)


def dense_with_grads(q, k, v, dout, mask, softmax_scale, dtype, softcap=0.0, sinks=None, dlse=None, rounded=None):
    """dict of out, lse, dq, dk, dv and, with sinks [Hq], dsinks by the textbook formulas, every operation in ``dtype``.

    Also dq_terms and dk_terms: the same sums over absolute values, the scale of what cancels in dq and dk.

    Args:
        rounded: out as a kernel keeps it, from which delta = rowsum(out * dout) is taken; None: out itself.
    """
    q, k, v, dout = (x.detach().to(dtype) for x in (q, k, v, dout))
    out, lse = dense_attention(q, k, v, mask, softmax_scale, softcap, sinks)
    group = q.shape[1] // k.shape[1]
    k_all, v_all = (x.repeat_interleave(group, 1) for x in (k, v))
    scores, slope = torch.einsum("qhd,khd->hqk", q, k_all) * softmax_scale, 1.0
    if softcap:
        tanh = torch.tanh(scores / softcap)
        scores, slope = softcap * tanh, 1 - tanh**2
    probs = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).T[..., None]).masked_fill(~mask, 0.0)
    dprobs = torch.einsum("qhd,khd->hqk", dout, v_all)
    delta = ((out if rounded is None else rounded) * dout).sum(-1)
    if dlse is not None:
        delta = delta - dlse.to(dtype)
    extra = {}
    if sinks is not None:
        sinks = sinks.detach().to(dtype)
        extra = {"dsinks": -(torch.exp(sinks - lse) * delta).sum(0)}
    delta = delta.T[..., None]

    def per_kv_head(x):
        return x.unflatten(1, (k.shape[1], group)).sum(2)

    def through_scores(dscores, q, k_all):
        dq = torch.einsum("hqk,khd->qhd", dscores, k_all)
        return dq * softmax_scale, per_kv_head(torch.einsum("hqk,qhd->khd", dscores, q)) * softmax_scale

    dq, dk = through_scores(probs * (dprobs - delta) * slope, q, k_all)
    dq_terms, dk_terms = through_scores(probs * (dprobs.abs() + delta.abs()), q.abs(), k_all.abs())
    dv = per_kv_head(torch.einsum("hqk,qhd->khd", probs, dout))
    terms = {"dq_terms": dq_terms, "dk_terms": dk_terms}
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv} | extra | terms


def assert_within_budget(ours, q, k, v, dout, mask, softmax_scale, **options):
    """|ours - fp64| <= 2 |plain low precision - fp64| + 4 eps |fp64|, in norm, per tensor; lse where it is finite.

    Where dq or dk is exactly 0 because each row sees one key, what must be small is compared with what cancelled.

    Args:
        options: softcap, sinks, dlse of ``dense_with_grads``.
    """
    exact = dense_with_grads(q, k, v, dout, mask, softmax_scale, torch.float64, **options)
    plain = dense_with_grads(q, k, v, dout, mask, softmax_scale, q.dtype, **options)
    seen, sinks = mask.any(1), options.get("sinks")
    of_nothing = -torch.inf if sinks is None else sinks.to(ours["lse"].dtype)
    assert (ours["lse"][~seen] == of_nothing).all()
    assert (ours["out"][~seen] == 0).all()
    assert (ours["dq"][~seen] == 0).all()
    for name in ("out", "lse", "dq", "dk", "dv", *(["dsinks"] if sinks is not None else [])):
        got, low, want = ours[name].double(), plain[name].double(), exact[name]
        assert got.shape == want.shape, name
        if name == "lse":
            got, low, want = got[seen], low[seen], want[seen]
        eps = torch.finfo(torch.float32 if name in ("lse", "dsinks") else q.dtype).eps
        error = (got - want).norm()
        budget = 2 * (low - want).norm() + 4 * eps * want.norm()
        terms = exact[name + "_terms"].norm() if name in ("dq", "dk") else 0.0
        if want.norm() <= 1e-9 * terms:
            budget = 4 * eps * terms
        assert error <= budget, f"{name}: error {error:.3e} over budget {budget:.3e}"
