"""Times optax's SAM on JAX beside ours.

Started by `tessera-bench` as a child process. Each line on standard input asks for something, each line on standard output
answers it:

    compile NET 1      ->  seconds that the first step takes, compilation included
    time NET STEPS     ->  seconds per step, after compilation
    loss NET STEPS     ->  the loss after that many steps from the start
    quit
"""

import os
import sys
import time

# XLA takes as many threads as the process has processors.
os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: int(sys.argv[1])]))

import jax
import jax.numpy as jnp
import numpy as np
import optax

NETS = {"small": ([64, 128, 128, 10], 64), "large": ([784, 2048, 2048, 2048, 10], 256)}


def wave(count, scale, phase):
    """The numbers that both sides start from: a sine, in double precision, rounded to single."""
    return jnp.asarray((scale * np.sin(np.arange(count, dtype=np.float64) * 0.7 + phase)).astype(np.float32))


def loss_of(params, x, y):
    hidden = x
    for i, (weight, bias) in enumerate(params):
        hidden = hidden @ weight.T + bias
        if i < len(params) - 1:
            hidden = jax.nn.relu(hidden)
    return optax.softmax_cross_entropy_with_integer_labels(hidden, y).mean()


class Training:
    def __init__(self, net):
        widths, batch = NETS[net]
        self.params = [
            (wave(a * b, a**-0.5, i).reshape(b, a), jnp.zeros(b, jnp.float32))
            for i, (a, b) in enumerate(zip(widths, widths[1:]))
        ]
        self.x = wave(batch * widths[0], 1.0, 9.0).reshape(batch, widths[0])
        self.y = jnp.arange(batch) % 10
        # One call is one whole SAM step (two gradients) in the opaque mode.
        ascent = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
        optimizer = optax.contrib.sam(optax.sgd(0.01, momentum=0.9), ascent, sync_period=2, opaque_mode=True)
        self.state = optimizer.init(self.params)

        @jax.jit
        def step(params, state, x, y):
            def gradient(p, _):
                return jax.grad(loss_of)(p, x, y)

            updates, state = optimizer.update(gradient(params, 0), state, params, grad_fn=gradient)
            return optax.apply_updates(params, updates), state

        self.jitted = step

    def step(self):
        self.params, self.state = self.jitted(self.params, self.state, self.x, self.y)

    def wait(self):
        jax.block_until_ready(self.params)


def main():
    trainings = {net: Training(net) for net in NETS}
    print("ready", jax.__version__, flush=True)
    for line in sys.stdin:
        words = line.split()
        if words[0] == "quit":
            return
        task, net = words[0], words[1]
        steps = 1 if task == "compile" else int(words[2])
        training = Training(net) if task in ("loss", "compile") else trainings[net]
        start = time.perf_counter()
        for _ in range(steps):
            training.step()
        training.wait()
        seconds = (time.perf_counter() - start) / steps
        answer = float(loss_of(training.params, training.x, training.y)) if task == "loss" else seconds
        print(answer, flush=True)


main()
