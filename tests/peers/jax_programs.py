"""Milliseconds of the programs of tests/src/peers.rs under XLA's partitioner on 8 CPU devices, as JSON: a median for each."""
import json
import os
import time

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

STEPS = 20
found = {}
random = np.random.default_rng(0)


def normal(*shape, scale=1.0):
    return random.standard_normal(shape, dtype=np.float32) * np.float32(scale)


def measure(name, axes, function, args, specs, results):
    mesh = Mesh(np.array(jax.devices()).reshape(tuple(axes.values())), tuple(axes))
    is_spec = lambda x: isinstance(x, P)
    lie = lambda tree: jax.tree.map(lambda spec: NamedSharding(mesh, spec), tree, is_leaf=is_spec)
    args = jax.tree.map(jax.device_put, args, lie(specs))
    compiled = jax.jit(function, in_shardings=lie(specs), out_shardings=lie(results)).lower(*args).compile()
    seconds = []
    for _ in range(STEPS + 3):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        seconds.append(time.perf_counter() - start)
    found[name] = 1e3 * sorted(seconds[3:])[STEPS // 2]


def descend(model):
    def step(p, x, y):
        loss, gradients = jax.value_and_grad(lambda p: jnp.mean((model(p, x) - y) ** 2))(p)
        return jax.tree.map(lambda a, g: a - 1e-2 * g, p, gradients), loss

    return step


def mlp(p, x):
    return jax.nn.gelu(x @ p["w1"]) @ p["w2"]


def norm(x, weight):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weight


def block(p, x):
    n = norm(x, p["ln1"])
    q, k, v = (jnp.einsum("bsd,dhe->bhse", n, p[w]) for w in ("wq", "wk", "wv"))
    scores = jnp.einsum("bhse,bhte->bhst", q, k) / np.sqrt(q.shape[-1])
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    share = jax.nn.softmax(jnp.where(seen, scores, -1e9), -1)
    x = x + jnp.einsum("bhst,bhte,hed->bsd", share, v, p["wo"])
    return x + mlp(p, norm(x, p["ln2"]))


weights = {"w1": normal(512, 2048, scale=0.02), "w2": normal(2048, 512, scale=0.02)}
x, y = normal(256, 512), normal(256, 512)
split = {"w1": P(None, "tp"), "w2": P("tp", None)}
for name, axes, place, rows in [
    ("tp8", {"tp": 8}, split, P()),
    ("dp8", {"dp": 8}, {"w1": P(), "w2": P()}, P("dp")),
    ("fsdp8", {"dp": 8}, {"w1": P("dp"), "w2": P("dp")}, P("dp")),
    ("dp2 tp4", {"dp": 2, "tp": 4}, split, P("dp")),
    ("sp8", {"tp": 8}, split, P("tp")),
]:
    measure(f"mlp forward {name}", axes, mlp, (weights, x), (place, rows), rows)
    measure(f"mlp train {name}", axes, descend(mlp), (weights, x, y), (place, rows, rows), (place, P()))

D, H, E, W = 256, 8, 32, 1024
shapes = {"ln1": (D,), "ln2": (D,), "wq": (D, H, E), "wk": (D, H, E), "wv": (D, H, E), "wo": (H, E, D), "w1": (D, W), "w2": (W, D)}
weights = {name: np.ones(s, np.float32) if len(s) == 1 else normal(*s, scale=0.02) for name, s in shapes.items()}
x, y = normal(8, 128, D), normal(8, 128, D)
whole = {name: P() for name in shapes}
heads = {name: P(None, "tp") for name in ("wq", "wk", "wv", "w1")} | {"wo": P("tp"), "w2": P("tp"), "ln1": P(), "ln2": P()}
both = {name: P("dp", "tp") for name in ("wq", "wk", "wv", "w1")}
both |= {"wo": P("tp", None, "dp"), "w2": P("tp", "dp"), "ln1": P(), "ln2": P()}
for name, axes, place, rows in [
    ("tp8", {"tp": 8}, heads, P()),
    ("dp8", {"dp": 8}, whole, P("dp")),
    ("fsdp8", {"dp": 8}, {name: P("dp") for name in shapes}, P("dp")),
    ("fsdp2 tp4", {"dp": 2, "tp": 4}, both, P("dp")),
]:
    measure(f"block train {name}", axes, descend(block), (weights, x, y), (place, rows, rows), (place, P()))

print(json.dumps(found, indent=1))
