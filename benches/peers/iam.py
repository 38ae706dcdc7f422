"""Times IAM's steps, written from its formulas with torch.func.functional_call, beside ours.

Started by `tessera-bench` as a child process. Each line on standard input asks for one round, each line on standard
output answers it:

    time METHOD NET STEPS            ->  seconds per step, with normal noise
    loss METHOD NET STEPS            ->  the loss after that many steps from the start, with noise that both sides can make
    inconsistency METHOD NET STEPS   ->  the inconsistency of the last of these steps (asked after the loss)
    quit
"""

import sys
import time

import torch
from torch.func import functional_call
from torch.nn.functional import cross_entropy, log_softmax

NETS = {"small": ([64, 128, 128, 10], 64), "large": ([784, 2048, 2048, 2048, 10], 256)}
RHO, BETA, SIGMA = 0.05, 1.0, 1.0


def wave(count, scale, phase):
    """The numbers that both sides start from: a sine, in double precision, rounded to single."""
    index = torch.arange(count, dtype=torch.float64)
    return (scale * torch.sin(index * 0.7 + phase)).float()


def divergence(log_p, log_q):
    return (log_p.exp() * (log_p - log_q)).sum(1).mean()


class Training:
    def __init__(self, method, net, shared_noise):
        widths, batch = NETS[net]
        layers = []
        for i, (fan_in, fan_out) in enumerate(zip(widths, widths[1:])):
            linear = torch.nn.Linear(fan_in, fan_out)
            with torch.no_grad():
                linear.weight.copy_(wave(fan_in * fan_out, fan_in**-0.5, i).reshape(fan_out, fan_in))
                linear.bias.zero_()
            layers += [linear, torch.nn.ReLU()]
        self.model = torch.nn.Sequential(*layers[:-1])
        self.x = wave(batch * widths[0], 1.0, 9.0).reshape(batch, widths[0])
        self.y = torch.arange(batch) % 10
        self.params = dict(sorted(self.model.named_parameters()))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.method, self.shared_noise = method, shared_noise
        self.count = sum(p.numel() for p in self.params.values())
        self.inconsistency = None

    def noise(self):
        if self.shared_noise:
            scale = (2.0 / self.count) ** 0.5
            parts = enumerate(self.params.items())
            return {name: wave(p.numel(), scale, i + 0.5).reshape(p.shape) for i, (name, p) in parts}
        return {name: torch.randn_like(p) * (SIGMA / self.count**0.5) for name, p in self.params.items()}

    def at(self, delta):
        return functional_call(self.model, {name: p + delta[name] for name, p in self.params.items()}, (self.x,))

    def search(self, p):
        """One power step on the Fisher matrix: rho g / |g| with the gradient of the divergence in delta."""
        delta = {name: d.requires_grad_() for name, d in self.noise().items()}
        shifted = {name: w.detach() + delta[name] for name, w in self.params.items()}
        log_q = log_softmax(functional_call(self.model, shifted, (self.x,)), 1)
        gradients = torch.autograd.grad(-(p * log_q).sum(1).mean(), list(delta.values()))
        norm = torch.sqrt(sum(g.double().square().sum() for g in gradients))
        scale = (RHO / (norm + 1e-12)).float()
        return {name: g * scale for name, g in zip(delta, gradients)}

    def step(self):
        self.optimizer.zero_grad()
        if self.method == "iam-d":
            z = self.model(self.x)
            log_p = log_softmax(z, 1)
            delta = self.search(log_p.detach().exp())
            penalty = divergence(log_p, log_softmax(self.at(delta), 1))
            loss = cross_entropy(z, self.y) + BETA * penalty
        else:
            with torch.no_grad():
                log_p = log_softmax(self.model(self.x), 1)
            delta = self.search(log_p.exp())
            shifted = self.at(delta)
            penalty = divergence(log_p, log_softmax(shifted.detach(), 1))
            loss = cross_entropy(shifted, self.y)
        loss.backward()
        self.optimizer.step()
        self.inconsistency = penalty.item()


def main(threads):
    torch.set_num_threads(threads)
    timed = {}
    print("ready", torch.__version__, flush=True)
    for line in sys.stdin:
        words = line.split()
        if words[0] == "quit":
            return
        task, method, net, steps = words[0], words[1], words[2], int(words[3])
        if task == "inconsistency":
            print(fresh.inconsistency, flush=True)
            continue
        if task == "loss":
            fresh = Training(method, net, shared_noise=True)
            for _ in range(steps):
                fresh.step()
            with torch.no_grad():
                print(cross_entropy(fresh.model(fresh.x), fresh.y).item(), flush=True)
            continue
        if (method, net) not in timed:
            timed[method, net] = Training(method, net, shared_noise=False)
        training = timed[method, net]
        start = time.perf_counter()
        for _ in range(steps):
            training.step()
        print((time.perf_counter() - start) / steps, flush=True)


main(int(sys.argv[1]))
