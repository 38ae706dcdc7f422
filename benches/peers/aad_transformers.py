"""Times AAD as one would write it on transformers: `generate` with the policy and a logits processor that asks the reference.

Started by `tessera-bench` as a child process. Each line on standard input asks for something, each line on standard output
answers it with a number. Prompts are token ids with commas between.

    policy FOLDER 0         ->  0, with the policy loaded from a Hugging Face checkpoint
    reference FOLDER 0      ->  0, with the reference
    aad IDS N               ->  seconds per token of N tokens by AAD with alpha = 0.1
    greedy IDS N            ->  seconds per token of N tokens of the policy alone
    aad-digest IDS N        ->  a number that other tokens would change
    greedy-digest IDS N     ->  the same for the policy alone
    select x N              ->  seconds of one choice from two arrays of 49,152 logits, mean of N
    quit
"""

import math
import sys
import time

import torch
import transformers

ALPHA = 0.1


def choose(z_policy, z_reference):
    policy, reference = torch.log_softmax(z_policy, -1), torch.log_softmax(z_reference, -1)
    plausible = policy >= policy.max(-1, keepdim=True).values + math.log(ALPHA)
    return (policy - reference).masked_fill(~plausible, -math.inf).argmax(-1)


class Aligned(transformers.LogitsProcessor):
    """Leaves the token that AAD chooses."""

    def __init__(self, reference):
        self.reference = reference
        self.cache = None
        self.seen = 0

    def __call__(self, input_ids, scores):
        out = self.reference(input_ids[:, self.seen :], past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache, self.seen = out.past_key_values, input_ids.shape[1]
        chosen = choose(scores, out.logits[:, -1].to(scores.dtype))
        return torch.full_like(scores, -math.inf).scatter(-1, chosen[:, None], 0.0)


class Session:
    def __init__(self):
        self.models = {}
        shape = (1, 49152)
        generator = torch.Generator().manual_seed(0)
        self.logits = [3 * torch.randn(shape, generator=generator) for _ in range(2)]

    def load(self, which, folder):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        self.models[which] = model
        return 0

    def tokens(self, task, ids, n):
        processors = transformers.LogitsProcessorList()
        if task == "aad":
            processors.append(Aligned(self.models["reference"]))
        ids = torch.tensor([[int(id) for id in ids.split(",")]])
        out = self.models["policy"].generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=n,
            do_sample=False,
            logits_processor=processors,
        )
        return out[0, ids.shape[1] :].tolist()

    def answer(self, task, what, n):
        if task in ("policy", "reference"):
            return self.load(task, what)
        if task == "select":
            start = time.perf_counter()
            for _ in range(n):
                choose(*self.logits).item()
            return (time.perf_counter() - start) / n
        if task.endswith("-digest"):
            return sum((i + 1) * id for i, id in enumerate(self.tokens(task.split("-")[0], what, n)))
        start = time.perf_counter()
        made = self.tokens(task, what, n)
        return (time.perf_counter() - start) / len(made)


@torch.inference_mode()
def main(threads):
    torch.set_num_threads(threads)
    session = Session()
    print("ready", torch.__version__, flush=True)
    for line in sys.stdin:
        if line.strip() == "quit":
            return
        task, rest = line.strip().split(" ", 1)
        what, n = rest.rsplit(" ", 1)
        print(session.answer(task, what, int(n)), flush=True)


main(int(sys.argv[1]))
