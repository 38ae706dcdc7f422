"""Times a language model in llama.cpp (through llama-cpp-python) beside ours.

Started by `tessera-bench` as a child process; asks and answers as in lm_transformers.py, `load` takes a GGUF file.
"""

import sys
import time

import llama_cpp
import numpy as np


class Session:
    def __init__(self, threads):
        self.threads = threads
        self.model = None

    def load(self, path):
        start = time.perf_counter()
        self.model = llama_cpp.Llama(
            path, n_ctx=1024, n_batch=512, n_threads=self.threads, n_threads_batch=self.threads, verbose=False
        )
        return time.perf_counter() - start

    def prompt(self, tokens):
        """The tokens that both sides read."""
        return [i * 7919 % 49000 + 100 for i in range(tokens)]

    def last_logits(self):
        logits = llama_cpp.llama_get_logits_ith(self.model.ctx, -1)
        return np.ctypeslib.as_array(logits, shape=(self.model.n_vocab(),))

    def prefill(self, tokens, runs):
        ids = self.prompt(tokens)
        start = time.perf_counter()
        for _ in range(runs):
            self.model.reset()
            self.model.eval(ids)
        return (time.perf_counter() - start) / runs / tokens

    def decode(self, tokens, steps):
        self.model.reset()
        self.model.eval(self.prompt(tokens))
        start = time.perf_counter()
        for _ in range(steps):
            self.model.eval([int(self.last_logits().argmax())])
        return (time.perf_counter() - start) / steps

    def top(self, tokens):
        self.model.reset()
        self.model.eval(self.prompt(tokens))
        return float(self.last_logits().max())


def resident():
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


def main(threads):
    session = Session(threads)
    print("ready", llama_cpp.__version__, flush=True)
    for line in sys.stdin:
        if line.strip() == "quit":
            return
        task, rest = line.strip().split(" ", 1)
        argument, count = rest.rsplit(" ", 1)
        if task == "load":
            answer = session.load(argument)
        elif task == "prefill":
            answer = session.prefill(int(argument), int(count))
        elif task == "decode":
            answer = session.decode(int(argument), int(count))
        elif task == "top":
            answer = session.top(int(argument))
        else:
            answer = resident()
        print(answer, flush=True)


main(int(sys.argv[1]))
