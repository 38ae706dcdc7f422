"""Times what a map of CHaRS is made of in the libraries that people use for it, beside ours.

Started by `tessera-bench` as a child process. Each line on standard input asks for something, each line on standard output
answers it with a number. Shapes are given as M,K,D.

    shift M,K,D N       ->  seconds of one call of the published double sum over pairs of clusters, written with broadcasting
    shift-norm M,K,D 0  ->  Euclidean norm of its result
    add M,D N           ->  seconds of one call of repeng's module around a layer that does nothing
    kmeans M,K,D N      ->  seconds of one fit of scikit-learn's KMeans from the first K rows
    inertia M,K,D 0     ->  the inertia that it ends with
    sinkhorn K,D N      ->  seconds of one call of POT's Sinkhorn with a tenth of the median cost
    sinkhorn-cost K,D 0 ->  the cost of its plan
    emd K,D N           ->  seconds of one call of POT's exact solver
    emd-cost K,D 0      ->  the cost of its plan
    eigh D N            ->  seconds of one eigendecomposition of a D x D covariance
    quit
"""

import sys
import time

import numpy
import torch

# repeng 0.4 writes a name that NumPy 2 no longer has.
numpy.float_ = numpy.float64
import ot
import repeng.control
import sklearn.cluster


def values(first, rows, columns):
    """The same numbers on both sides: between -0.5 and 0.5, no two rows alike."""
    i = numpy.arange(first, first + rows, dtype=numpy.int64)[:, None]
    j = numpy.arange(columns, dtype=numpy.int64)[None, :]
    return (i * 7919 + j * 104729 + i * j * 31) % 10007 / 10007 - 0.5


def shift(m, k, d):
    x, a, b = (torch.tensor(values(first, n, d), dtype=torch.float32) for first, n in ((0, m), (5000, k), (7000, k)))
    plan = torch.full((k, k), 1 / k / k)

    def call():
        distances = ((x[:, None, :] - a[None]) ** 2).sum(-1)
        gates = torch.exp(-distances / distances.median(dim=1, keepdim=True).values)
        weights = plan[None] * gates[:, :, None]
        weights = weights / weights.sum(dim=(1, 2), keepdim=True)
        pairs = b[None, :, :] - a[:, None, :]
        return (weights[..., None] * pairs[None]).sum(dim=(1, 2))

    return call


def add(m, d):
    module = repeng.control.ControlModule(torch.nn.Identity())
    module.set_control(repeng.control.BlockControlParams(torch.tensor(values(5000, 1, d)[0], dtype=torch.float32)))
    x = torch.tensor(values(0, m, d), dtype=torch.float32)[None]
    return lambda: module(x)


def clusters(m, k, d):
    x = (0.6 * values(9000, k, d)[numpy.arange(m) % k] + values(0, m, d)).astype(numpy.float32)
    start = x[:k].copy()
    model = sklearn.cluster.KMeans(k, init=start, n_init=1, max_iter=300, tol=1e-4, algorithm="lloyd")
    return lambda: model.fit(x)


def coupling(k, d):
    a, b = values(5000, k, d), values(7000, k, d)
    cost = ((a[:, None, :] - b[None]) ** 2).sum(-1)
    return numpy.full(k, 1 / k), cost


def covariance(d):
    x = torch.tensor(values(0, 2 * d, d), dtype=torch.float32)
    return x.T @ x


def timed(call, n):
    call()
    start = time.perf_counter()
    for _ in range(n):
        call()
    return (time.perf_counter() - start) / n


@torch.inference_mode()
def answer(task, shape, n):
    if task == "shift":
        return timed(shift(*shape), n)
    if task == "shift-norm":
        return shift(*shape)().norm().item()
    if task == "add":
        return timed(add(*shape), n)
    if task == "kmeans":
        return timed(clusters(*shape), n)
    if task == "inertia":
        return clusters(*shape)().inertia_
    if task.startswith("sinkhorn"):
        p, cost = coupling(*shape)
        call = lambda: ot.sinkhorn(p, p, cost, 0.1 * numpy.median(cost), numItermax=1000, stopThr=1e-9)
        return timed(call, n) if task == "sinkhorn" else (call() * cost).sum()
    if task.startswith("emd"):
        p, cost = coupling(*shape)
        call = lambda: ot.emd(p, p, cost)
        return timed(call, n) if task == "emd" else (call() * cost).sum()
    c = covariance(shape[0])
    start = time.perf_counter()
    torch.linalg.eigh(c)
    return time.perf_counter() - start


def main(threads):
    torch.set_num_threads(threads)
    print("ready", torch.__version__, flush=True)
    for line in sys.stdin:
        if line.strip() == "quit":
            return
        task, shape, n = line.split()
        print(answer(task, [int(part) for part in shape.split(",")], int(n)), flush=True)


main(int(sys.argv[1]))
