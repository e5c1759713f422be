#!/usr/bin/env python3
"""Runs the same work in meshc, JAX and PyTorch on this machine's CPUs, each in turn, and prints the ratios.

    python3 tests/peers/peers.py [--python PYTHON] [--rounds N]

PYTHON has jax or torch installed; what it lacks is left out. Of each the best round counts.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def run(*words):
    done = subprocess.run([str(w) for w in words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}: {done.stderr[-2000:]}")
    return done.stdout


def has(python, module):
    return subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode == 0


def best(rounds, *measures):
    """The least of some rounds, in turn, of each measure: a dict of times."""
    least = [{} for _ in measures]
    for _ in range(rounds):
        for into, measure in zip(least, measures):
            for name, time in measure().items():
                into[name] = min(time, into.get(name, time))
    return least


def programs(python, rounds):
    ours = ROOT / "target/release/examples/peers"
    one, other = best(
        rounds,
        lambda: json.loads(run(ours)),
        lambda: json.loads(run(python, HERE / "jax_programs.py")),
    )
    print(f"{'program, 8 ranks':24} {'meshc':>10} {'JAX':>10} {'ratio':>7}")
    for name, time in one.items():
        print(f"{name:24} {time:7.2f} ms {other[name]:7.2f} ms {time / other[name]:7.2f}")


def step(python, rounds):
    shape = ["--seq", "256", "--global-batch", "8", "--steps", "5", "--format", "json"]

    def ours(mesh, workers):
        split = ["--mesh", mesh] if mesh else []
        command = ["target/release/meshc", "bench", "step", HERE / "gpt.json", *split, "--workers", workers, *shape]
        return json.loads(run(*command))["step_seconds"]

    def measure():
        return {mesh: ours(mesh, 1 if not mesh else 2) for mesh in ("", "dp=2", "tp=2")}

    def theirs():
        return {threads: float(run(python, HERE / "torch_gpt.py", threads)) for threads in (1, 2)}

    one, other = best(rounds, measure, theirs)
    print(f"\n{'GPT step, 2048 tokens':24} {'meshc':>10} {'PyTorch':>10} {'tokens/s':>8}")
    for mesh, time in one.items():
        peer = other[1 if not mesh else 2]
        print(f"{mesh or 'one rank':24} {time:8.3f} s {peer:8.3f} s {peer / time:7.2f}x")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has the peers")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    run("cargo", "build", "--release", "-p", "meshc", "-p", "meshc-tests", "--bin", "meshc", "--example", "peers")
    print(f"{os.cpu_count()} cores, the best of {args.rounds} rounds")
    for module, compare in [("jax", programs), ("torch", step)]:
        if has(args.python, module):
            compare(args.python, args.rounds)
        else:
            print(f"{args.python} has no {module}: left out")


main()
