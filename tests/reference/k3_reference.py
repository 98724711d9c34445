"""Independent numpy reference for the Kimi K3 architecture family.

Written from the formulas in the K3 specification. Everything runs in float64 unless a caller passes another
dtype; weights are used exactly as stored (bf16 and MXFP4 decode losslessly into float64).

Shapes: T tokens, H hidden, N heads, K/V head dims. Linear weights are [out, in].
"""
import base64
import json
import os
import struct
import unicodedata

import numpy as np

F = np.float64


# --------------------------------------------------------------------------- number formats

def bf16_from_float(x):
    """float array -> uint16 bf16 bit patterns, round to nearest even."""
    u = np.ascontiguousarray(np.asarray(x, np.float32)).view(np.uint32).astype(np.uint64)
    r = (u + 0x7FFF + ((u >> 16) & 1)) >> 16
    return r.astype(np.uint16)


def bf16_to_float(b):
    return (np.asarray(b, np.uint16).astype(np.uint32) << 16).view(np.float32).astype(F)


def round_bf16(x):
    return bf16_to_float(bf16_from_float(x))


E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], F)
_E2M1_SIGNED = np.concatenate([E2M1, -E2M1])


def mxfp4_unpack(packed, scale):
    """[out, in/2] u8, [out, in/32] u8 -> [out, in] float64."""
    packed = np.asarray(packed, np.uint8)
    out_dim, half = packed.shape
    codes = np.empty((out_dim, half * 2), np.uint8)
    codes[:, 0::2] = packed & 15
    codes[:, 1::2] = packed >> 4
    if np.any(scale == 255):
        raise ValueError("E8M0 scale 255 is NaN")
    s = np.exp2(scale.astype(F) - 127.0)
    return _E2M1_SIGNED[codes] * np.repeat(s, 32, axis=1)


def mxfp4_pack(w, rule="nosat"):
    """[out, in] -> (packed, scale). rule 'nosat': smallest power of two with amax/scale <= 6;
    rule 'ocp': exponent floor(log2 amax) - 2, values above 6 saturate."""
    w = np.asarray(w, F)
    out_dim, n = w.shape
    if n % 32:
        raise ValueError("input dimension must be a multiple of 32")
    g = w.reshape(out_dim, n // 32, 32)
    amax = np.abs(g).max(-1)
    nz = amax > 0
    safe = np.where(nz, amax, 1.0)
    if rule == "nosat":
        e = np.ceil(np.log2(safe / 6.0))
        e = np.where(safe > 6.0 * np.exp2(e), e + 1, e)
        e = np.where(safe <= 6.0 * np.exp2(e - 1), e - 1, e)
    else:
        e = np.frexp(safe)[1] - 1 - 2
    e = np.clip(e + 127, 0, 254)
    e = np.where(nz, e, 0).astype(np.uint8)
    x = np.abs(g) / np.exp2(e.astype(F) - 127)[..., None]
    mid = (E2M1[1:] + E2M1[:-1]) / 2
    code = np.searchsorted(mid, x, side="left")            # a tie falls to the lower code here
    tie = np.zeros(x.shape, bool)
    inside = code < len(mid)
    tie[inside] = x[inside] == mid[code[inside]]
    code = np.where(tie & (code % 2 == 1), code + 1, code)  # ties go to the even code
    code = code.astype(np.uint8) | (np.signbit(g).astype(np.uint8) << 3)
    code = code.reshape(out_dim, n)
    return (code[:, 0::2] | (code[:, 1::2] << 4)).astype(np.uint8), e


# --------------------------------------------------------------------------- safetensors by hand

_ST = {"F64": (8, "<f8"), "F32": (4, "<f4"), "I64": (8, "<i8"), "I32": (4, "<i4"), "U8": (1, "u1"), "BF16": (2, "<u2")}


def st_write(path, tensors, metadata=None):
    """tensors: dict name -> (dtype string, ndarray of storage type). Order: wide dtypes first, then name."""
    order = sorted(tensors, key=lambda k: (-_ST[tensors[k][0]][0], k))
    head, off, blobs = {}, 0, []
    if metadata:
        head["__metadata__"] = {k: str(v) for k, v in metadata.items()}
    for name in order:
        dt, a = tensors[name]
        a = np.ascontiguousarray(np.asarray(a)).astype(_ST[dt][1])
        raw = a.tobytes()
        head[name] = {"dtype": dt, "shape": list(np.asarray(tensors[name][1]).shape), "data_offsets": [off, off + len(raw)]}
        off += len(raw)
        blobs.append(raw)
    h = json.dumps(head, separators=(",", ":")).encode()
    h += b" " * (-len(h) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(h)) + h)
        for b in blobs:
            f.write(b)
    return off


def st_header(path):
    with open(path, "rb") as f:
        n = struct.unpack("<Q", f.read(8))[0]
        return json.loads(f.read(n)), 8 + n


def st_read(path, raw=False):
    head, base = st_header(path)
    out = {}
    with open(path, "rb") as f:
        for name, e in head.items():
            if name == "__metadata__":
                continue
            f.seek(base + e["data_offsets"][0])
            a = np.frombuffer(f.read(e["data_offsets"][1] - e["data_offsets"][0]), _ST[e["dtype"]][1]).reshape(e["shape"])
            if raw:
                out[name] = (e["dtype"], a)
            elif e["dtype"] == "BF16":
                out[name] = bf16_to_float(a)
            elif e["dtype"] in ("F32", "F64"):
                out[name] = a.astype(F)
            else:
                out[name] = a
    return out


# --------------------------------------------------------------------------- elementary functions

def sigmoid(x):
    x = np.asarray(x, F)
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, e) / (1.0 + e)


def silu(x):
    return x * sigmoid(x)


ENCODER_ACT = {"silu": silu, "tanh": np.tanh, "relu": lambda x: np.maximum(x, 0.0), "none": lambda x: x}


def softplus(x):
    return np.logaddexp(0.0, x)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rms_norm(x, w, eps, rnd=None):
    y = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps)
    if rnd:
        return rnd(rnd(y) * w)
    return y * w


def l2_norm(x, eps=1e-6):
    return x / np.sqrt(np.sum(x * x, -1, keepdims=True) + eps)


def situ(g, u, beta=4.0, linear_beta=25.0):
    a = beta * np.tanh(g / beta) * sigmoid(g)
    return a * (u if linear_beta is None else linear_beta * np.tanh(u / linear_beta))


def situ_backward(g, u, dy, beta=4.0, linear_beta=25.0):
    s, t = sigmoid(g), np.tanh(g / beta)
    if linear_beta is None:
        b, db = u, np.ones_like(u)
    else:
        tu = np.tanh(u / linear_beta)
        b, db = linear_beta * tu, 1.0 - tu * tu
    return dy * ((1 - t * t) * s + beta * t * s * (1 - s)) * b, dy * beta * t * s * db


# --------------------------------------------------------------------------- KDA

def short_conv(x, w, history):
    """Depthwise causal convolution then SiLU. x [T,P], w [P,1,k] or [P,k], history [k-1,P] (oldest first)."""
    w = np.asarray(w, F).reshape(x.shape[1], -1)
    k = w.shape[1]
    full = np.concatenate([history, x], 0)
    y = np.zeros_like(x)
    for j in range(k):
        y += full[j:j + x.shape[0]] * w[:, j]
    return silu(y), full[full.shape[0] - (k - 1):].copy()


def kda_gate(z, a_log, lower_bound=None):
    """z [T,N,K] (dt_bias already added), a_log [N] -> log decay [T,N,K]."""
    a = np.exp(np.asarray(a_log, F)).reshape(-1, 1)
    return lower_bound * sigmoid(a * z) if lower_bound is not None else -a * softplus(z)


def kda_recurrent(q, k, v, g, beta, state=None, scale=None):
    """q,k,g [T,N,K], v [T,N,V], beta [T,N]; q,k already L2-normalised. Returns o [T,N,V], state [N,K,V]."""
    T, N, K = q.shape
    V = v.shape[-1]
    scale = K ** -0.5 if scale is None else scale
    S = np.zeros((N, K, V), F) if state is None else np.array(state, F)
    o = np.zeros((T, N, V), F)
    for t in range(T):
        S = S * np.exp(g[t])[:, :, None]
        u = beta[t][:, None] * (v[t] - np.einsum("nkv,nk->nv", S, k[t]))
        S = S + k[t][:, :, None] * u[:, None, :]
        o[t] = np.einsum("nkv,nk->nv", S, q[t] * scale)
    return o, S


def _unit_lower_inverse(L, method):
    """(I + L)^-1 for strictly lower L [C,C]."""
    C = L.shape[0]
    I = np.eye(C)
    if method == "neumann":                # L is nilpotent: product of (I + L^(2^i)) after (I - L)
        inv, p, e = I - L, L @ L, 2
        while e < C:
            inv = inv @ (I + p)
            p, e = p @ p, e * 2
        return inv
    inv = np.zeros_like(L)
    for i in range(C):                     # forward substitution
        inv[i] = I[i] - L[i, :i] @ inv[:i]
    return inv


def kda_chunked(q, k, v, g, beta, state=None, scale=None, chunk=16, decay="pairwise", inverse="substitution"):
    """Chunkwise-parallel form. decay: 'pairwise' (exact for any g) or 'factored' (needs bounded g)."""
    T, N, K = q.shape
    V = v.shape[-1]
    scale = K ** -0.5 if scale is None else scale
    S = np.zeros((N, K, V), F) if state is None else np.array(state, F)
    pad = -T % chunk
    if pad:
        z = lambda a: np.concatenate([a, np.zeros((pad,) + a.shape[1:], F)], 0)
        q, k, v, g, beta = z(q), z(k), z(v), z(g), z(beta)
    o = np.zeros((T + pad, N, V), F)
    low, lowd = np.tril(np.ones((chunk, chunk)), -1), np.tril(np.ones((chunk, chunk)))
    for t0 in range(0, T + pad, chunk):
        for n in range(N):
            sl = slice(t0, t0 + chunk)
            qn, kn, vn, gn, bn = q[sl, n] * scale, k[sl, n], v[sl, n], g[sl, n], beta[sl, n]
            G = np.cumsum(gn, 0)
            if decay == "factored":
                kinv = kn * np.exp(-G)
                A = (kn * np.exp(G)) @ kinv.T
                B = (qn * np.exp(G)) @ kinv.T
            else:
                D = np.exp(np.minimum(G[:, None, :] - G[None, :, :], 0.0))
                A = np.einsum("id,jd,ijd->ij", kn, kn, D)
                B = np.einsum("id,jd,ijd->ij", qn, kn, D)
            M = _unit_lower_inverse(low * (bn[:, None] * A), inverse) * bn[None, :]
            U = M @ vn - (M @ (kn * np.exp(G))) @ S[n]
            o[sl, n] = (qn * np.exp(G)) @ S[n] + (lowd * B) @ U
            S[n] = np.exp(G[-1])[:, None] * S[n] + (kn * np.exp(G[-1] - G)).T @ U
    return o[:T], S


def kda_recurrent_backward(q, k, v, g, beta, do, dstate=None, state=None, scale=None):
    """Gradients of sum(o*do) + sum(S_T*dstate). Returns dq, dk, dv, dg, dbeta, dS0."""
    T, N, K = q.shape
    V = v.shape[-1]
    scale = K ** -0.5 if scale is None else scale
    S = np.zeros((N, K, V), F) if state is None else np.array(state, F)
    hist = []
    for t in range(T):
        dec = S * np.exp(g[t])[:, :, None]
        e = v[t] - np.einsum("nkv,nk->nv", dec, k[t])
        u = beta[t][:, None] * e
        new = dec + k[t][:, :, None] * u[:, None, :]
        hist.append((S, dec, e, u, new))
        S = new
    dq, dk, dv, dg, db = (np.zeros_like(a) for a in (q, k, v, g, beta))
    dS = np.zeros_like(S) if dstate is None else np.array(dstate, F)
    for t in range(T - 1, -1, -1):
        old, dec, e, u, new = hist[t]
        dq[t] = scale * np.einsum("nkv,nv->nk", new, do[t])
        dS = dS + scale * q[t][:, :, None] * do[t][:, None, :]
        du = np.einsum("nkv,nk->nv", dS, k[t])
        bdu = beta[t][:, None] * du
        db[t] = (e * du).sum(-1)
        dv[t] = bdu
        dk[t] = np.einsum("nkv,nv->nk", dS, u) - np.einsum("nkv,nv->nk", dec, bdu)
        dD = dS - k[t][:, :, None] * bdu[:, None, :]
        dg[t] = np.exp(g[t]) * (dD * old).sum(-1)
        dS = dD * np.exp(g[t])[:, :, None]
    return dq, dk, dv, dg, db, dS


# --------------------------------------------------------------------------- attention residuals

def attn_res_mix(bank, p, norm_w, proj_w, eps):
    """bank: list of [T,H]; p [T,H]; norm_w [H]; proj_w [1,H] or [H]. Returns mix [T,H], weights [T,n+1]."""
    rows = np.stack(list(bank) + [p], 1)                                   # [T,n+1,H]
    r = 1.0 / np.sqrt(np.mean(rows * rows, -1) + eps)
    s = r * (rows @ (norm_w * np.asarray(proj_w, F).reshape(-1)))
    pi = softmax(s)
    return np.einsum("te,teh->th", pi, rows), pi


def attn_res_backward(rows, w, eps, dy):
    """rows [T,n,H], w = norm*proj [H], dy [T,H] -> drows, dw."""
    H = rows.shape[-1]
    r = 1.0 / np.sqrt(np.mean(rows * rows, -1) + eps)
    s = r * (rows @ w)
    pi = softmax(s)
    dpi = np.einsum("th,teh->te", dy, rows)
    ds = pi * (dpi - (pi * dpi).sum(-1, keepdims=True))
    dw = np.einsum("te,te,teh->h", ds, r, rows)
    drows = pi[..., None] * dy[:, None] + (ds * r)[..., None] * (w - (r * s / H)[..., None] * rows)
    return drows, dw


# --------------------------------------------------------------------------- router and MoE

def topk_stable(x, k):
    """Highest first; equal values: lower index first."""
    return np.argsort(-x, axis=-1, kind="stable")[..., :k]


def route(logits, bias, k, scale=1.0, renorm=True, n_group=1, topk_group=1, func="sigmoid"):
    s = sigmoid(logits) if func == "sigmoid" else softmax(logits)
    c = s + (0.0 if bias is None else bias)
    if n_group > 1 and n_group > topk_group:
        T, E = c.shape
        gs = np.sort(c.reshape(T, n_group, -1), -1)[..., -2:].sum(-1)
        keep = np.zeros((T, n_group), bool)
        np.put_along_axis(keep, topk_stable(gs, topk_group), True, 1)
        c = np.where(np.repeat(keep, E // n_group, 1), c, -np.inf)
    idx = topk_stable(c, k)
    w = np.take_along_axis(s, idx, 1)
    if renorm and k > 1:
        w = w / (w.sum(-1, keepdims=True) + 1e-20)
    return idx, w * scale, s, c


def quantile_balance(scores, bias, k, center=True, rate=1.0):
    """One Quantile Balancing step, exact. scores [m,n], bias [n] used for routing this batch."""
    m, n = scores.shape
    biased = scores + bias
    alpha = -np.sort(-biased, axis=1)[:, k]
    margin = scores - alpha[:, None]
    q = min(max(int(round(m * k / n)), 0), m - 1)
    b = -(-np.sort(-margin, axis=0))[q]
    if rate != 1.0:
        b = bias + rate * (b - bias)
    return b - b.mean() if center else b


def quantile_balance_hist(scores, bias, k, bins=1000, center=True):
    m, n = scores.shape
    alpha = -np.sort(-(scores + bias), axis=1)[:, k]
    need = alpha[:, None] - scores
    lo, hi = bias.min() - 1.0, bias.max() + 1.0
    w = (hi - lo) / bins
    idx = np.clip(((need - lo) / w).astype(int), 0, bins - 1)
    b = np.empty(n)
    for j in range(n):
        h = np.bincount(idx[:, j], minlength=bins)
        c = np.cumsum(h)
        t = m * k / n
        i = min(int(np.searchsorted(c, t)), bins - 1)
        prev = c[i - 1] if i else 0
        b[j] = lo + (i + np.clip((t - prev) / max(h[i], 1), 0, 1)) * w
    return b - b.mean() if center else b


def quantile_sliding(scores, tau, k, rate):
    """tau <- (1-rate) tau + rate * (the (q+1)-th largest score of each expert), q = mk/n. Returns tau, bias."""
    m, n = scores.shape
    q = min(max(int(round(m * k / n)), 0), m - 1)
    tau = (1 - rate) * tau + rate * -np.sort(-scores, axis=0)[q]
    return tau, tau.mean() - tau


def balance_sign(load, bias, q, rate):
    return bias + rate * np.sign(q - load)


def aux_loss(logits, idx, coef, func="sigmoid"):
    """coef * n/k * sum_j f_j P_j and its gradient with respect to the logits (f_j is a constant)."""
    m, n = logits.shape
    k = idx.shape[1]
    f = np.bincount(idx.ravel(), minlength=n) / m
    s = sigmoid(logits) if func == "sigmoid" else softmax(logits)
    S = s.sum(-1, keepdims=True)
    c = coef * n / k
    ds = c / m / S * (f - (s / S * f).sum(-1, keepdims=True))
    ds = ds * s * (1 - s) if func == "sigmoid" else s * (ds - (s * ds).sum(-1, keepdims=True))
    return c * (f * (s / S).mean(0)).sum(), ds


# --------------------------------------------------------------------------- configuration

RESIDUAL = ("block_attn_res", "full_attn_res", "plain", "scaled", "gated", "gated_channel", "norm_scaled")
SITES = ("self_attention_res", "mlp_res")
VARIANT_KEYS = {      # k3_variant: allowed keys with their legal values or type (spec section 15.5)
    "residual": {"mode": RESIDUAL, "sites": ("both", "attention"), "alpha_init": float, "alpha_schedule": ("learned", "fixed_depth"),
                 "attn_res_gate": bool},
    "router": {"space": ("hidden", "latent", "encoder"), "encoder_dim": int, "encoder_act": ("silu", "tanh", "relu", "none")},
    "experts": {"width": ("latent", "hidden")},
    "decay": {"form": ("bounded", "softplus"), "lower_bound": float},
    "attention": {"layers": list, "pattern": list,
                  "gqa": {"num_kv_heads": int, "head_dim": int, "rope": ("none", "neox"), "rope_theta": float, "output_gate": bool,
                          "qk_norm": bool}},
}


def check_variant(v, allowed=VARIANT_KEYS, path="k3_variant"):
    """Copy of v without nulls; refuses unknown keys and values of the wrong kind."""
    if not isinstance(v, dict):
        raise ValueError(f"bad value {path}")
    out = {}
    for k, x in v.items():
        if k not in allowed:
            raise ValueError(f"unknown key {path}.{k}")
        if x is None:
            continue
        a = allowed[k]
        if isinstance(a, dict):
            out[k] = check_variant(x, a, f"{path}.{k}")
            continue
        num = isinstance(x, (int, float)) and not isinstance(x, bool)
        if a is float:
            ok = num
        elif a is int:
            ok = num and isinstance(x, int) and x > 0
        elif a is bool:
            ok = isinstance(x, bool)
        elif a is list:
            ok = isinstance(x, list) and len(x) > 0 and all(e in ("kda", "mla", "gqa") for e in x)
        else:
            ok = x in a
        if not ok:
            raise ValueError(f"bad value {path}.{k}")
        out[k] = x
    return out


def refuse(cond, words):
    if cond:
        raise ValueError(words)


class Config:
    def __init__(self, d):
        t = d.get("text_config", d)
        self.nested = "text_config" in d
        refuse(self.nested and d.get("k3_variant") is not None, "k3_variant belongs inside text_config")
        self.raw = t
        g = t.get
        self.hidden = g("hidden_size")
        self.layers = g("num_hidden_layers")
        self.vocab = g("vocab_size")
        self.eps = g("rms_norm_eps", 1e-5)
        self.mla_eps = g("mla_norm_eps", 1e-6)     # not in the release: our switch, see spec D2
        la = g("linear_attn_config") or {"kda_layers": []}
        self.kda_set = {i - 1 for i in la.get("kda_layers") or []}
        self.kda_heads, self.kda_dim = la.get("num_heads"), la.get("head_dim")
        self.conv_k = la.get("short_conv_kernel_size", 4)
        self.lower_bound = la.get("gate_lower_bound")
        self.full_gate = bool(la.get("use_full_rank_gate", False))
        self.heads = g("num_attention_heads")
        self.q_lora, self.kv_lora = g("q_lora_rank"), g("kv_lora_rank")
        self.nope, self.rope, self.vdim = g("qk_nope_head_dim"), g("qk_rope_head_dim"), g("v_head_dim")
        self.mla_gate = bool(g("mla_use_output_gate", False))
        self.experts, self.topk = g("num_experts"), g("num_experts_per_token")
        self.first_dense, self.moe_freq = g("first_k_dense_replace", 0), g("moe_layer_freq", 1)
        self.latent, self.latent_norm = g("routed_expert_hidden_size"), bool(g("latent_moe_use_norm", False))
        self.renorm, self.route_scale = g("moe_renormalize", True), g("routed_scaling_factor", 1.0)
        self.n_group, self.topk_group = g("num_expert_group", 1), g("topk_group", 1)
        self.score_func = g("moe_router_activation_func", "sigmoid")
        self.shared = g("num_shared_experts", 0)
        self.act = g("hidden_act", "silu")
        self.b1, self.b2 = g("activation_situ_beta") or 1.0, g("activation_situ_linear_beta")
        self.res_block = g("attn_res_block_size")
        both = self.kda_set | {i - 1 for i in la.get("full_attn_layers") or []}
        if la.get("kda_layers") and la.get("full_attn_layers") is not None and both != set(range(self.layers)):
            raise ValueError("kda_layers and full_attn_layers do not cover the stack")
        self.kinds = ["kda" if i in self.kda_set else "mla" for i in range(self.layers)]
        v = g("k3_variant")
        self.variant(check_variant({} if v is None else v), g("linear_attn_config") or {})

    def variant(self, v, la):
        """Apply k3_variant and refuse illegal combinations (spec section 15.5)."""
        r, o, x, d, at = (v.get(k, {}) for k in ("residual", "router", "experts", "decay", "attention"))
        # residual
        self.residual = m = r.get("mode", "block_attn_res" if self.res_block else "plain")
        self.sites = SITES if r.get("sites", "both") == "both" else SITES[:1]
        self.alpha_fixed = r.get("alpha_schedule", "learned") == "fixed_depth"
        self.alpha_init = r.get("alpha_init", 1.0)
        self.mix_gate = r.get("attn_res_gate", False)
        refuse(m == "block_attn_res" and not self.res_block, "attn_res_block_size required by residual mode block_attn_res")
        refuse(m != "block_attn_res" and self.res_block, f"attn_res_block_size conflicts with residual mode {m}")
        refuse(len(self.sites) == 1 and m in RESIDUAL[:3], f"residual sites attention conflicts with residual mode {m}")
        refuse("alpha_schedule" in r and m not in ("scaled", "norm_scaled"), "alpha_schedule needs residual mode scaled or norm_scaled")
        refuse("alpha_init" in r and (m not in ("scaled", "norm_scaled") or self.alpha_fixed), "alpha_init needs a learned residual alpha")
        refuse(self.mix_gate and m != "block_attn_res", "attn_res_gate needs residual mode block_attn_res")
        # router and experts
        self.router = o.get("space", "hidden")
        self.enc_dim, self.enc_act = o.get("encoder_dim"), o.get("encoder_act", "silu")
        width = x.get("width", "latent" if self.latent else "hidden")
        refuse(self.router != "hidden" and not self.experts, f"router {self.router} needs num_experts")
        refuse(self.router == "latent" and not self.latent, "router latent needs routed_expert_hidden_size")
        refuse(self.router == "encoder" and not self.enc_dim, "router encoder needs encoder_dim")
        refuse(self.router != "encoder" and ("encoder_dim" in o or "encoder_act" in o), "encoder settings need router encoder")
        refuse("width" in x and not self.experts, "experts width needs num_experts")
        refuse(width == "latent" and not self.latent, "experts width latent needs routed_expert_hidden_size")
        refuse(width == "hidden" and self.latent, "experts width hidden conflicts with routed_expert_hidden_size")
        refuse("width" in x and width == "hidden" and self.latent_norm, "experts width hidden conflicts with latent_moe_use_norm")
        # attention kinds
        refuse("layers" in at and "pattern" in at, "attention layers and pattern exclude each other")
        if "layers" in at or "pattern" in at:
            n = self.layers
            kinds = at["layers"] if "layers" in at else (at["pattern"] * n)[:n]
            refuse(len(kinds) != n, f"attention layers has {len(kinds)} entries, expected {n}")
            kda = [i + 1 for i in range(n) if kinds[i] == "kda"]
            full = [i + 1 for i in range(n) if kinds[i] != "kda"]
            for key, want in (("kda_layers", kda), ("full_attn_layers", full)):
                refuse(la.get(key) is not None and sorted(la[key]) != want, "attention conflicts with linear_attn_config")
            self.kinds, self.kda_set = kinds, {i - 1 for i in kda}
        refuse("kda" in self.kinds and not self.kda_heads, "kda layer needs linear_attn_config")
        refuse("mla" in self.kinds and not self.kv_lora, "mla layer needs kv_lora_rank")
        q = at.get("gqa", {})
        refuse("gqa" in at and "gqa" not in self.kinds, "gqa settings without a gqa layer")
        self.gqa_kv, self.gqa_dim = q.get("num_kv_heads"), q.get("head_dim")
        self.gqa_rope, self.rope_theta = q.get("rope", "none") == "neox", q.get("rope_theta", 10000.0)
        self.gqa_gate, self.gqa_norm = q.get("output_gate", False), q.get("qk_norm", False)
        if "gqa" in self.kinds:
            refuse(not (self.gqa_kv and self.gqa_dim), "gqa layer needs num_kv_heads and head_dim")
            refuse(self.heads % self.gqa_kv, "num_attention_heads is not a multiple of gqa num_kv_heads")
            refuse(self.gqa_rope and self.gqa_dim % 2, "gqa rope needs an even head_dim")
            refuse("rope_theta" in q and not self.gqa_rope, "rope_theta needs gqa rope neox")
            refuse(self.rope_theta <= 0, "bad value k3_variant.attention.gqa.rope_theta")
        # decay
        form = d.get("form", "bounded" if self.lower_bound is not None else "softplus")
        refuse(d and "kda" not in self.kinds, "decay settings without a kda layer")
        refuse(form == "softplus" and "lower_bound" in d, "decay lower_bound conflicts with form softplus")
        lb = d.get("lower_bound", -5.0 if self.lower_bound is None else self.lower_bound)
        self.lower_bound = lb if form == "bounded" else None
        refuse(form == "bounded" and lb >= 0, "decay lower_bound must be negative")

    def is_moe(self, i):
        return bool(self.experts) and i >= self.first_dense and i % self.moe_freq == 0


def expected_tensors(c):
    """name (without prefix) -> (shape, dtype) of every text tensor; expert matrices are listed by their plain name."""
    H, t = c.hidden, {}

    def put(name, *shape, dt="BF16"):
        t[name] = (shape, dt)

    def lin(name, o, i):
        put(name + ".weight", o, i)

    def mlp(base, width):
        lin(base + "gate_proj", width, H), lin(base + "up_proj", width, H), lin(base + "down_proj", H, width)

    mix = c.residual.endswith("attn_res")
    for i, kind in enumerate(c.kinds):
        L = f"model.layers.{i}."
        put(L + "input_layernorm.weight", H), put(L + "post_attention_layernorm.weight", H)
        for s in c.sites:
            if mix:
                put(L + s + "_norm.weight", H), lin(L + s + "_proj", 1, H)
            if c.mix_gate:
                put(L + s + "_gamma", 1, dt="F32")
            if c.residual in ("scaled", "norm_scaled") and not c.alpha_fixed:
                put(L + s + "_alpha", 1, dt="F32")
            if c.residual == "norm_scaled":
                put(L + s + "_out_norm.weight", H)
            if c.residual in ("gated", "gated_channel"):
                n = 1 if c.residual == "gated" else H
                lin(L + s + "_gate", n, H), put(L + s + "_gate.bias", n, dt="F32")
        a = L + "self_attn."
        if kind == "kda":
            N, K = c.kda_heads, c.kda_dim
            P = N * K
            for nm in "qkv":
                lin(a + nm + "_proj", P, H), put(a + nm + "_conv1d.weight", P, 1, c.conv_k, dt="F32")
            lin(a + "f_a_proj", K, H), lin(a + "f_b_proj", P, K), lin(a + "b_proj", N, H), lin(a + "o_proj", H, P)
            put(a + "A_log", N, dt="F32"), put(a + "dt_bias", P, dt="F32"), put(a + "o_norm.weight", K, dt="F32")
            if c.full_gate:
                lin(a + "g_proj", P, H)
            else:
                lin(a + "g_a_proj", K, H), lin(a + "g_b_proj", P, K)
        elif kind == "gqa":
            N, G, D = c.heads, c.gqa_kv, c.gqa_dim
            lin(a + "q_proj", N * D, H), lin(a + "k_proj", G * D, H), lin(a + "v_proj", G * D, H), lin(a + "o_proj", H, N * D)
            if c.gqa_gate:
                lin(a + "g_proj", N * D, H)
            if c.gqa_norm:
                put(a + "q_norm.weight", D), put(a + "k_norm.weight", D)
        else:
            N, R, qd = c.heads, c.kv_lora, c.nope + c.rope
            if c.q_lora:
                lin(a + "q_a_proj", c.q_lora, H), put(a + "q_a_layernorm.weight", c.q_lora), lin(a + "q_b_proj", N * qd, c.q_lora)
            else:
                lin(a + "q_proj", N * qd, H)
            lin(a + "kv_a_proj_with_mqa", R + c.rope, H), put(a + "kv_a_layernorm.weight", R)
            lin(a + "kv_b_proj", N * (c.nope + c.vdim), R), lin(a + "o_proj", H, N * c.vdim)
            if c.mla_gate:
                lin(a + "g_proj", N * c.vdim, H)
        if not c.is_moe(i):
            mlp(L + "mlp.", c.raw["intermediate_size"])
            continue
        b, Z, I = L + "block_sparse_moe.", c.latent or H, c.raw["moe_intermediate_size"]
        lin(b + "gate", c.experts, {"hidden": H, "latent": Z, "encoder": c.enc_dim}[c.router])
        put(b + "gate.e_score_correction_bias", c.experts, dt="F32")
        if c.router == "encoder":
            lin(b + "router_encoder", c.enc_dim, H)
        if c.latent:
            lin(b + "routed_expert_down_proj", Z, H), lin(b + "routed_expert_up_proj", H, Z)
            if c.latent_norm:
                put(b + "routed_expert_norm.weight", Z)
        if c.shared:
            mlp(b + "shared_experts.", I * c.shared)
        for e in range(c.experts):
            lin(b + f"experts.{e}.w1", I, Z), lin(b + f"experts.{e}.w3", I, Z), lin(b + f"experts.{e}.w2", Z, I)
    put("model.embed_tokens.weight", c.vocab, H), put("model.norm.weight", H), put("lm_head.weight", c.vocab, H)
    if mix:
        put("model.output_attn_res_norm.weight", H), lin("model.output_attn_res_proj", 1, H)
    if c.mix_gate:
        put("model.output_attn_res_gamma", 1, dt="F32")
    return t


def check_tensors(c, have):
    """have: name (without prefix) -> shape. Raises when a tensor is missing, unexpected or of the wrong shape."""
    left = dict(have)
    for name, (shape, _) in expected_tensors(c).items():
        for n, s in ([(name, shape)] if name in left else [(name + "_packed", (shape[0], shape[1] // 2)), (name + "_scale", (shape[0], shape[1] // 32))]
                     if name + "_packed" in left else [(name, shape)]):
            got = left.pop(n, None)
            refuse(got is None, f"missing tensor {n}")
            ok = int(np.prod(got)) >= shape[0] if n.endswith("A_log") else tuple(got) == tuple(s)
            refuse(not ok, f"wrong shape {n}")
    for n in left:
        refuse(n.startswith(("model.", "lm_head")), f"unexpected tensor {n}")


# --------------------------------------------------------------------------- model

def rope_neox(x, pos, theta):
    """x [T,N,D], pos [T]: rotate the pairs (d, d + D/2) by pos * theta^(-2d/D)."""
    h = x.shape[-1] // 2
    ang = np.asarray(pos, F)[:, None] * theta ** (-np.arange(h) / h)
    c, s = np.cos(ang)[:, None], np.sin(ang)[:, None]
    return np.concatenate([x[..., :h] * c - x[..., h:] * s, x[..., h:] * c + x[..., :h] * s], -1)


class Cache:
    def __init__(self):
        self.kda = {}     # layer -> (state [N,K,V], conv_q, conv_k, conv_v)
        self.mla = {}     # layer -> rows [t, kv_lora + rope]
        self.gqa = {}     # layer -> (k [t,G,D] after norm and rotation, v [t,G,D])
        self.tokens = 0


class Model:
    def __init__(self, path, rnd=None):
        with open(os.path.join(path, "config.json")) as f:
            self.cfg = Config(json.load(f))
        with open(os.path.join(path, "model.safetensors.index.json")) as f:
            index = json.load(f)["weight_map"]
        self.w = {}
        for shard in sorted(set(index.values())):
            self.w.update(st_read(os.path.join(path, shard)))
        if set(self.w) != set(index):
            raise ValueError("index and shards disagree")
        self.p = "language_model." if any(k.startswith("language_model.") for k in self.w) else ""
        check_tensors(self.cfg, {k[len(self.p):]: a.shape for k, a in self.w.items() if k.startswith(self.p)})
        self.rnd = rnd
        self._ex = {}

    def __getitem__(self, name):
        return self.w[self.p + name]

    def _r(self, x):
        return self.rnd(x) if self.rnd else x

    def lin(self, x, name):
        return self._r(x @ self[name + ".weight"].T)

    def act(self, g, u):
        c = self.cfg
        return self._r(situ(g, u, c.b1, c.b2) if c.act == "situ" else silu(g) * u)

    def expert(self, layer, e, which):
        key = (layer, e, which)
        if key not in self._ex:
            base = f"model.layers.{layer}.block_sparse_moe.experts.{e}.{which}.weight"
            if self.p + base + "_packed" in self.w:
                self._ex[key] = mxfp4_unpack(self[base + "_packed"], self[base + "_scale"])
            else:
                self._ex[key] = self[base]
        return self._ex[key]

    # ---- layers
    def kda(self, i, x, cache, impl="recurrent", trace=None):
        c, a = self.cfg, f"model.layers.{i}.self_attn."
        T, N, K = x.shape[0], c.kda_heads, c.kda_dim
        P = N * K
        if i in cache.kda:
            state, hist = cache.kda[i][0], list(cache.kda[i][1:])
        else:
            state, hist = None, [np.zeros((c.conv_k - 1, P), F) for _ in range(3)]
        s = []
        for j, nm in enumerate("qkv"):
            y, hist[j] = short_conv(self.lin(x, a + nm + "_proj"), self[a + nm + "_conv1d.weight"], hist[j])
            s.append(self._r(y).reshape(T, N, K))
        q, k, v = l2_norm(s[0]), l2_norm(s[1]), s[2]
        f = self.lin(self.lin(x, a + "f_a_proj"), a + "f_b_proj").reshape(T, N, K)
        z = f + self[a + "dt_bias"].reshape(N, K)
        g = kda_gate(z, self[a + "A_log"].reshape(-1)[:N], c.lower_bound)
        beta = sigmoid(self.lin(x, a + "b_proj"))
        if impl == "recurrent":
            o, state = kda_recurrent(q, k, v, g, beta, state)
        else:
            o, state = kda_chunked(q, k, v, g, beta, state, chunk=16,
                                   decay="factored" if c.lower_bound is not None else "pairwise", inverse="neumann")
        cache.kda[i] = (state, *hist)
        gate = self.lin(x, a + "g_proj") if c.full_gate else self.lin(self.lin(x, a + "g_a_proj"), a + "g_b_proj")
        y = rms_norm(o, self[a + "o_norm.weight"], c.eps) * sigmoid(gate.reshape(T, N, K))
        if trace is not None:
            trace.update(q=q, k=k, v=v, g=g, beta=beta, o=o, state=state, gated=y)
        return self.lin(self._r(y).reshape(T, P), a + "o_proj")

    def mla(self, i, x, cache, impl="plain", trace=None):
        c, a = self.cfg, f"model.layers.{i}.self_attn."
        T, N, R = x.shape[0], c.heads, c.kv_lora
        if c.q_lora:
            q = self.lin(rms_norm(self.lin(x, a + "q_a_proj"), self[a + "q_a_layernorm.weight"], c.mla_eps, self.rnd), a + "q_b_proj")
        else:
            q = self.lin(x, a + "q_proj")
        q = q.reshape(T, N, c.nope + c.rope)
        ckr = self.lin(x, a + "kv_a_proj_with_mqa")
        row = np.concatenate([rms_norm(ckr[:, :R], self[a + "kv_a_layernorm.weight"], c.mla_eps, self.rnd), ckr[:, R:]], 1)
        rows = np.concatenate([cache.mla[i], row], 0) if i in cache.mla else row
        cache.mla[i] = rows
        S = rows.shape[0]
        wkv = self[a + "kv_b_proj.weight"].reshape(N, c.nope + c.vdim, R)
        wuk, wuv = wkv[:, :c.nope], wkv[:, c.nope:]
        scale = (c.nope + c.rope) ** -0.5
        mask = np.where(np.arange(S)[None, :] <= (S - T + np.arange(T))[:, None], 0.0, -np.inf)
        if impl == "plain":
            kn = self._r(np.einsum("sr,ndr->snd", rows[:, :R], wuk))
            vv = self._r(np.einsum("sr,ndr->snd", rows[:, :R], wuv))
            sc = np.einsum("tnd,snd->nts", q[..., :c.nope], kn) + np.einsum("tnd,sd->nts", q[..., c.nope:], rows[:, R:])
            pr = softmax(sc * scale + mask)
            o = np.einsum("nts,snd->tnd", self._r(pr), vv)
        else:
            qa = np.einsum("tnd,ndr->tnr", q[..., :c.nope], wuk)
            sc = np.einsum("tnr,sr->nts", qa, rows[:, :R]) + np.einsum("tnd,sd->nts", q[..., c.nope:], rows[:, R:])
            pr = softmax(sc * scale + mask)
            o = np.einsum("tnr,ndr->tnd", np.einsum("nts,sr->tnr", pr, rows[:, :R]), wuv)
        o = self._r(o).reshape(T, N * c.vdim)
        if c.mla_gate:
            o = self._r(o * self._r(sigmoid(self.lin(x, a + "g_proj"))))
        if trace is not None:
            trace.update(rows=rows, probs=pr, gated=o)
        return self.lin(o, a + "o_proj")

    def gqa(self, i, x, cache, trace=None):
        c, a = self.cfg, f"model.layers.{i}.self_attn."
        T, N, G, D = x.shape[0], c.heads, c.gqa_kv, c.gqa_dim
        q, k, v = (self.lin(x, a + nm + "_proj").reshape(T, -1, D) for nm in "qkv")
        if c.gqa_norm:
            q, k = (rms_norm(y, self[a + nm + "_norm.weight"], c.eps, self.rnd) for y, nm in ((q, "q"), (k, "k")))
        past = cache.gqa[i][0].shape[0] if i in cache.gqa else 0
        if c.gqa_rope:
            q, k = (self._r(rope_neox(y, past + np.arange(T), c.rope_theta)) for y in (q, k))
        if past:
            k, v = (np.concatenate([old, new], 0) for old, new in zip(cache.gqa[i], (k, v)))
        cache.gqa[i] = (k, v)
        kk, vv = np.repeat(k, N // G, 1), np.repeat(v, N // G, 1)      # query head n reads key head n // (N/G)
        mask = np.where(np.arange(past + T)[None, :] <= past + np.arange(T)[:, None], 0.0, -np.inf)
        pr = softmax(np.einsum("tnd,snd->nts", q, kk) * D ** -0.5 + mask)
        o = self._r(np.einsum("nts,snd->tnd", self._r(pr), vv)).reshape(T, N * D)
        if c.gqa_gate:
            o = self._r(o * self._r(sigmoid(self.lin(x, a + "g_proj"))))
        if trace is not None:
            trace.update(k=k, v=v, probs=pr, gated=o)
        return self.lin(o, a + "o_proj")

    def mlp(self, x, base):
        return self.lin(self.act(self.lin(x, base + "gate_proj"), self.lin(x, base + "up_proj")), base + "down_proj")

    def moe(self, i, x, trace=None):
        c, b = self.cfg, f"model.layers.{i}.block_sparse_moe."
        z = self.lin(x, b + "routed_expert_down_proj") if c.latent else x
        ri = z if c.router == "latent" else x                          # what the router reads, never rounded
        if c.router == "encoder":
            ri = ENCODER_ACT[c.enc_act](x @ self[b + "router_encoder.weight"].T)
        logits = ri @ self[b + "gate.weight"].T
        idx, w, s, biased = route(logits, self[b + "gate.e_score_correction_bias"], c.topk, c.route_scale, c.renorm,
                                  c.n_group, c.topk_group, c.score_func)
        y = np.zeros_like(z)
        for e in np.unique(idx):
            t, j = np.nonzero(idx == e)
            h = self.act(self._r(z[t] @ self.expert(i, e, "w1").T), self._r(z[t] @ self.expert(i, e, "w3").T))
            y[t] += w[t, j][:, None] * self._r(h @ self.expert(i, e, "w2").T)
        y = self._r(y)
        comb = y
        if c.latent:
            if c.latent_norm:
                y = rms_norm(y, self[b + "routed_expert_norm.weight"], c.eps, self.rnd)
            y = self.lin(y, b + "routed_expert_up_proj")
        if c.shared:
            y = self._r(y + self.mlp(x, b + "shared_experts."))
        if trace is not None:
            srt = -np.sort(-biased, 1)
            trace.update(logits=logits, idx=idx, weights=w, latent=z, combined=comb, margin=(srt[:, c.topk - 1] - srt[:, c.topk]).min())
        return y

    # ---- whole stack
    def forward(self, tokens, cache=None, kda_impl="recurrent", mla_impl="plain", trace=None):
        c = self.cfg
        cache = Cache() if cache is None else cache
        p, bank = self["model.embed_tokens.weight"][np.asarray(tokens)], []
        rec = (lambda k, v: trace.__setitem__(k, v)) if trace is not None else (lambda k, v: None)

        def attend(i, h):
            tr = {} if trace is not None else None
            n = rms_norm(h, self[f"model.layers.{i}.input_layernorm.weight"], c.eps, self.rnd)
            if c.kinds[i] == "gqa":
                y = self.gqa(i, n, cache, tr)
            else:
                y = self.kda(i, n, cache, kda_impl, tr) if c.kinds[i] == "kda" else self.mla(i, n, cache, mla_impl, tr)
            rec(f"attn_in.{i}", n), rec(f"attn_out.{i}", y), rec(f"attn_tr.{i}", tr)
            return n, y

        def feed(i, h):
            tr = {} if trace is not None else None
            n = rms_norm(h, self[f"model.layers.{i}.post_attention_layernorm.weight"], c.eps, self.rnd)
            y = self.moe(i, n, tr) if c.is_moe(i) else self.mlp(n, f"model.layers.{i}.mlp.")
            rec(f"ffn_in.{i}", n), rec(f"ffn_out.{i}", y), rec(f"ffn_tr.{i}", tr)
            return n, y

        def site(name, x):                                 # mix over the banked rows and the live row x
            m, pi = attn_res_mix(bank, x, self[f"model.{name}_norm.weight"], self[f"model.{name}_proj.weight"], c.eps)
            rec(f"pi.{name}", pi)
            return self._r(x + self[f"model.{name}_gamma"] * (m - x) if c.mix_gate else m)

        def step(i, s, x, n, y):                           # x + (scaled or gated) y
            L = f"model.layers.{i}.{s}"
            mode = c.residual if s in c.sites else "plain"
            kw = {}
            if mode in ("scaled", "norm_scaled"):
                kw["alpha"] = (2 * c.layers) ** -0.5 if c.alpha_fixed else self[L + "_alpha"]
            if mode == "norm_scaled":
                kw["norm_w"] = self[L + "_out_norm.weight"]
            if mode in ("gated", "gated_channel"):
                kw["gate_logit"] = n @ self[L + "_gate.weight"].T + self[L + "_gate.bias"]
                rec(f"gate.layers.{i}.{s}", sigmoid(kw["gate_logit"]))
            return self._r(residual_step(x, y, mode, eps=c.eps, **kw))

        for i in range(c.layers):
            L = f"layers.{i}."
            if c.residual == "block_attn_res":
                h = site(L + SITES[0], p) if bank else p
                fresh = i % c.res_block == 0
                if fresh:
                    bank.append(p)
                a = attend(i, h)[1]
                p = a if fresh else self._r(p + a)
                p = self._r(p + feed(i, site(L + SITES[1], p))[1])
            elif c.residual == "full_attn_res":            # every earlier sublayer output is its own row; p = the newest one
                for s, f in zip(SITES, (attend, feed)):
                    h = site(L + s, p) if bank else p
                    bank.append(p)
                    p = f(i, h)[1]
            else:
                for s, f in zip(SITES, (attend, feed)):
                    p = step(i, s, p, *f(i, p))
            rec(f"p.{i}", p)
        h = site("output_attn_res", p) if c.residual.endswith("attn_res") else p
        h = rms_norm(h, self["model.norm.weight"], c.eps, self.rnd)
        rec("final", h)
        cache.tokens += len(tokens)
        return h @ self["lm_head.weight"].T


# --------------------------------------------------------------------------- variants (spec section 15)

def kv_attend(q_scores, values, mult):
    """Attention over possibly merged entries: logits + log multiplicity. q_scores [...,S], values [S,D]."""
    p = softmax(q_scores + np.log(mult))
    return p @ values, p


def kv_importance(imp, probs, rho=0.9, agg="mean"):
    """imp [S], probs [N,S] of the newest query."""
    a = probs.mean(0) if agg == "mean" else probs.max(0)
    return rho * imp + (1 - rho) * a


def kv_budgets(total, layers, mode="uniform", b_min=0, importance=None, first=None):
    if mode == "uniform":
        b = np.full(layers, total / layers)
    elif mode == "pyramid":
        last = 2 * total / layers - first
        b = np.linspace(first, last, layers)
    else:
        n = []
        for i in importance:
            p = i / i.sum()
            n.append(np.exp(-np.sum(p * np.log(np.where(p > 0, p, 1.0)))))
        n = np.array(n)
        b = b_min + (total - layers * b_min) * n / n.sum()
    lo = np.floor(b).astype(int)
    lo[np.argsort(-(b - lo), kind="stable")[:total - lo.sum()]] += 1
    return lo


def kv_compact(rows, imp, mult, pos, budget, n_sink, n_recent, mode="merge", merge_max=4, eps=1e-9):
    """Bring one layer's cache to `budget` entries or fewer. Returns rows, imp, mult, pos."""
    S = rows.shape[0]
    if S <= budget:
        return rows, imp, mult, pos
    free = np.arange(n_sink, S - n_recent)
    order = free[np.argsort(imp[free], kind="stable")]
    kill = np.zeros(S, bool)
    for count in range(1, len(order) + 1):                  # smallest victim set that meets the budget
        kill[order[count - 1]] = True
        groups, i = [], 0
        while i < S:
            if not kill[i]:
                groups.append([i])
                i += 1
                continue
            j = i
            while j < S and kill[j] and j - i < merge_max:
                j += 1
            if mode == "merge":
                groups.append(list(range(i, j)))
            i = j
        if len(groups) <= budget:
            break
    out = []
    for g in groups:
        w = mult[g] * np.maximum(imp[g], eps)
        out.append(((w[:, None] * rows[g]).sum(0) / w.sum(), imp[g].sum(), mult[g].sum(), pos[g].max()))
    return tuple(np.array([o[n] for o in out]) for n in range(4))


def residual_step(x, y, mode="plain", alpha=1.0, gate_logit=None, norm_w=None, eps=1e-5):
    """x stream, y sublayer output. gate_logit broadcastable to x."""
    if mode == "scaled":
        return x + alpha * y
    if mode in ("gated", "gated_channel"):
        return x + sigmoid(gate_logit) * y
    if mode == "norm_scaled":
        return x + alpha * rms_norm(y, norm_w, eps)
    return x + y


def latent_router_moe(x, w_dn, w_r, w_up, experts, k, bias=None, b1=4.0, b2=25.0):
    """Variant router_space='latent'. experts: list of (w1, w3, w2) on the latent."""
    z = x @ w_dn.T
    idx, w, _, _ = route(z @ w_r.T, bias, k)
    y = np.zeros_like(z)
    for t in range(x.shape[0]):
        for j in range(k):
            w1, w3, w2 = experts[idx[t, j]]
            y[t] += w[t, j] * (situ(z[t] @ w1.T, z[t] @ w3.T, b1, b2) @ w2.T)
    return y @ w_up.T, idx, w


# --------------------------------------------------------------------------- tokenizer

_cls = unicodedata.category


def _is_han(ch):
    o = ord(ch)
    return (0x4E00 <= o <= 0x9FFF or 0x3400 <= o <= 0x4DBF or 0x20000 <= o <= 0x2A6DF or 0x2A700 <= o <= 0x2EBE0
            or 0x2EBF0 <= o <= 0x2EE5D or 0x30000 <= o <= 0x323AF or 0xF900 <= o <= 0xFA6D or 0xFA70 <= o <= 0xFAD9
            or 0x2F800 <= o <= 0x2FA1D or 0x2E80 <= o <= 0x2E99 or 0x2E9B <= o <= 0x2EF3 or 0x2F00 <= o <= 0x2FD5
            or o in (0x3005, 0x3007) or 0x3021 <= o <= 0x3029 or 0x3038 <= o <= 0x303B
            or o in (0x16FE2, 0x16FE3, 0x16FF0, 0x16FF1))


def _letter(ch):
    return _cls(ch)[0] == "L"


def _num(ch):
    return _cls(ch)[0] == "N"


def _space(ch):
    return ch in "\t\n\x0b\x0c\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" or "\u2000" <= ch <= "\u200a"


def _up(ch):
    c = _cls(ch)
    return (c in ("Lu", "Lt", "Lm", "Lo") or c[0] == "M") and not _is_han(ch)


def _lo(ch):
    c = _cls(ch)
    return (c in ("Ll", "Lm", "Lo") or c[0] == "M") and not _is_han(ch)


def _contraction(s, i):
    if i < len(s) and s[i] == "'":
        t = "".join("s" if c == "\u017f" else c.lower() for c in s[i + 1:i + 3])   # U+017F folds to s
        if t[:1] and t[0] in "stmd":
            return 2
        if t in ("re", "ve", "ll"):
            return 3
    return 0


def pre_tokenize(s):
    """Split text as described in spec section 12."""
    out, i, n = [], 0, len(s)

    def run(j, f):
        while j < n and f(s[j]):
            j += 1
        return j

    while i < n:
        if _is_han(s[i]):
            j = run(i, _is_han)
            out.append(s[i:j])
            i = j
            continue
        end = None
        lead_ok = s[i] not in "\r\n" and not _letter(s[i]) and not _num(s[i])
        for kind in (2, 3):
            for st in ((i + 1, i) if lead_ok else (i,)):       # the optional char is taken greedily first
                if kind == 2:
                    a = run(st, _up)
                    while True:                                # U* gives characters back until L+ can match
                        b = run(a, _lo)
                        if b > a or a == st:
                            break
                        a -= 1
                    if b > a:
                        end = b
                        break
                else:
                    a = run(st, _up)
                    if a > st:
                        end = run(a, _lo)
                        break
            if end is not None:
                end += _contraction(s, end)
                break
        if end is None and _num(s[i]):
            end = min(run(i, _num), i + 3)
        if end is None:
            odd = lambda ch: not (_space(ch) or _letter(ch) or _num(ch))
            for st in ((i + 1, i) if s[i] == " " else (i,)):
                j = run(st, odd)
                if j > st:
                    end = run(j, lambda ch: ch in "\r\n")
                    break
        if end is None and _space(s[i]):
            j = run(i, _space)
            last = max((x for x in range(i, j) if s[x] in "\r\n"), default=None)
            if last is not None:
                end = last + 1
            elif j == n or j - i == 1:
                end = j
            else:
                end = j - 1
        if end is None:
            end = i + 1
        out.append(s[i:end])
        i = end
    return out


class Tokenizer:
    def __init__(self, path):
        self.rank = {}
        with open(os.path.join(path, "tiktoken.model")) as f:
            for line in f:
                if line.strip():
                    a, b = line.split()
                    self.rank[base64.b64decode(a)] = int(b)
        base = len(self.rank)
        names = {}
        p = os.path.join(path, "tokenizer_config.json")
        if os.path.exists(p):
            with open(p) as f:
                names = {int(k): v["content"] for k, v in json.load(f).get("added_tokens_decoder", {}).items()}
        self.special = {names.get(i, f"<|reserved_token_{i}|>"): i for i in range(base, base + 256)}
        self.inv = {v: k for k, v in self.rank.items()}
        self.inv.update({v: k.encode() for k, v in self.special.items()})

    def bpe(self, piece):
        parts = [bytes([b]) for b in piece]
        while len(parts) > 1:
            best, at = None, -1
            for j in range(len(parts) - 1):
                r = self.rank.get(parts[j] + parts[j + 1])
                if r is not None and (best is None or r < best):
                    best, at = r, j
            if best is None:
                break
            parts[at:at + 2] = [parts[at] + parts[at + 1]]
        return [self.rank[p] for p in parts]

    def encode(self, text):
        ids = []
        for piece in pre_tokenize(text):
            ids += self.bpe(piece.encode("utf-8"))
        return ids

    def encode_segments(self, segs):
        ids = []
        for text, special in segs:
            ids += [self.special[text]] if special else self.encode(text)
        return ids

    def decode(self, ids):
        return b"".join(self.inv[i] for i in ids).decode("utf-8", "replace")


# --------------------------------------------------------------------------- chat format

def _tag(name, attrs=()):
    s = [("<|open|>", True), (name, False)]
    for k, v in attrs:
        s += [(" " + k, False), ('="', False), (str(v).replace("&", "&amp;").replace('"', "&quot;"), False), ('"', False)]
    return [x for x in s if x[0]] + [("<|sep|>", True)]


def _end(name):
    return [("<|close|>", True), (name, False), ("<|sep|>", True)]


def _json_type(v):
    if v is None:
        return "null"
    if isinstance(v, bool):
        return "boolean"
    if isinstance(v, (int, float)):
        return "number"
    return {str: "string", dict: "object"}.get(type(v), "array")


def xtml_segments(messages, thinking=True, generation=True, head=(), tail=()):
    """Chat messages -> list of (text, is_special). head/tail: (type, body) system notices placed first / last."""
    S = []

    def put(t):
        if t not in (None, ""):
            S.append((str(t), False))

    def content(c):
        if isinstance(c, str):
            put(c)
        else:
            for part in c or ():
                put(part["text"])

    def message(attrs, body):
        S.extend(_tag("message", attrs))
        body()
        S.extend(_end("message"))
        S.append(("<|end_of_msg|>", True))

    for t, body in head:
        message([("role", "system"), ("type", t)], lambda: put(body))
    calls, order = [], 0
    i = 0
    messages = list(messages)
    while i < len(messages):                                # tool results go back to call order
        if messages[i]["role"] == "assistant":
            calls = messages[i].get("tool_calls") or []
        if messages[i]["role"] == "tool":
            j = i
            while j < len(messages) and messages[j]["role"] == "tool":
                j += 1
            ids = {}
            for n, c in enumerate(calls):
                if c.get("id") is not None:
                    ids.setdefault(str(c["id"]), (n, c.get("function", c).get("name")))
            grp = [(ids.get(str(m.get("tool_call_id", m.get("id")))), m) for m in messages[i:j]]
            if all(a for a, _ in grp):
                grp.sort(key=lambda a: a[0][0])
                messages[i:j] = [dict(m, tool=a[1]) if a[1] else m for a, m in grp]
            i = j
            continue
        i += 1
    calls = None
    for m in messages:
        role = m["role"]
        extra = [("name", m["name"])] if m.get("name") and role != "tool" else []
        if role in ("user", "system"):
            message([("role", role)] + extra, lambda: content(m.get("content")))
        elif role == "tool":
            order += 1
            name = m.get("tool", m.get("name"))
            if name is None and calls and order <= len(calls):
                name = calls[order - 1].get("function", calls[order - 1])["name"]
            message([("role", "tool"), ("tool", name), ("index", order)], lambda: content(m.get("content")))
        else:
            calls, order = m.get("tool_calls"), 0

            def body():
                if thinking:
                    S.extend(_tag("think"))
                    r = m.get("reasoning_content") or m.get("reasoning")
                    if r is not None and str(r).strip():
                        put(r)
                    S.extend(_end("think"))
                S.extend(_tag("response"))
                content(m.get("content"))
                S.extend(_end("response"))
                if calls:
                    S.extend(_tag("tools"))
                    for n, c in enumerate(calls, 1):
                        f = c.get("function", c)
                        S.extend(_tag("call", [("tool", f["name"]), ("index", n)]))
                        args = f.get("arguments")
                        if isinstance(args, str):
                            try:
                                args = json.loads(args) if args.strip() else {}
                            except ValueError:
                                S.extend(_tag("json", [("type", "object")]))
                                put(args)
                                S.extend(_end("json"))
                                args = {}
                        for k, v in (args or {}).items():
                            S.extend(_tag("argument", [("key", k), ("type", _json_type(v))]))
                            put(v if isinstance(v, str) else json.dumps(v, ensure_ascii=False))
                            S.extend(_end("argument"))
                        S.extend(_end("call"))
                    S.extend(_end("tools"))

            message([("role", "assistant")] + extra, body)
    for t, bodyt in tail:
        message([("role", "system"), ("type", t)], lambda: put(bodyt))
    if generation:
        S.extend(_tag("message", [("role", "assistant")]))
        S.extend(_tag("think" if thinking else "response"))
    return S
