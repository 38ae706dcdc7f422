"""Times a language model in transformers on PyTorch beside ours.

Started by `tessera-bench` as a child process. Each line on standard input asks for something, each line on standard output
answers it:

    load FOLDER 0       ->  seconds that loading the Hugging Face checkpoint took
    prefill TOKENS N    ->  seconds per token of a prompt of so many tokens, mean of N runs, logits of the last token only
    decode TOKENS N     ->  seconds per token of N greedy steps after a prompt of so many tokens
    top TOKENS 0        ->  the largest logit after the prompt
    memory x 0          ->  resident memory of the process, MiB
    quit
"""

import sys
import time

import torch
import transformers


class Session:
    def __init__(self):
        self.model = None

    def load(self, folder):
        start = time.perf_counter()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return time.perf_counter() - start

    def prompt(self, tokens):
        """The tokens that both sides read."""
        return (torch.arange(tokens) * 7919 % 49000 + 100).unsqueeze(0)

    def prefill(self, tokens, runs):
        ids = self.prompt(tokens)
        start = time.perf_counter()
        for _ in range(runs):
            self.model(ids, use_cache=True, logits_to_keep=1)
        return (time.perf_counter() - start) / runs / tokens

    def decode(self, tokens, steps):
        out = self.model(self.prompt(tokens), use_cache=True, logits_to_keep=1)
        start = time.perf_counter()
        for _ in range(steps):
            ids = out.logits[:, -1].argmax(-1, keepdim=True)
            out = self.model(ids, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
        return (time.perf_counter() - start) / steps

    def top(self, tokens):
        return self.model(self.prompt(tokens), logits_to_keep=1).logits.max().item()


def resident():
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


@torch.inference_mode()
def main(threads):
    torch.set_num_threads(threads)
    session = Session()
    print("ready", torch.__version__, flush=True)
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
