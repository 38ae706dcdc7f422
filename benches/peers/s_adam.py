"""Times PyTorch's AdamW with the published probe loop beside our S-Adam.

The probe loop is written from the published formulas: unit Gaussian directions a tensor, forward differences at radius
sigma, damping exp(-lambda * variance / mean square), applied as a factor on the learning rate of the update while the
decay keeps the full rate.

Started by `tessera-bench` as a child process. Each line on standard input asks for one round, each line on standard
output answers it:

    time NET STEPS      ->  seconds per step; NET ends in "-foreach" for AdamW's multi-tensor path
    loss NET STEPS      ->  the loss after that many steps without damping from the start
    damping NET STEPS   ->  the mean damping of that many steps from the start
    quit
"""

import math
import sys
import time

import torch

NETS = {
    "digits": ([196, 64, 64, 10], 64),
    "million": ([784, 832, 400, 10], 64),
    "large": ([784, 2048, 2048, 2048, 10], 256),
}
LR, DECAY, SIGMA, STRENGTH, ZETA, CAP, PROBES = 1e-4, 1e-2, 0.01, 2.0, 1e-6, 10.0, 2


def wave(count, scale, phase):
    """The numbers that both sides start from: a sine, in double precision, rounded to single."""
    index = torch.arange(count, dtype=torch.float64)
    return (scale * torch.sin(index * 0.7 + phase)).float()


class Training:
    def __init__(self, net, foreach, strength=STRENGTH):
        widths, batch = NETS[net]
        layers = []
        for i, (fan_in, fan_out) in enumerate(zip(widths, widths[1:])):
            linear = torch.nn.Linear(fan_in, fan_out)
            with torch.no_grad():
                linear.weight.copy_(wave(fan_in * fan_out, fan_in**-0.5, i).reshape(fan_out, fan_in))
                linear.bias.zero_()
            layers += [linear, torch.nn.ReLU()]
        self.model = torch.nn.Sequential(*layers[:-1])
        self.params = list(self.model.parameters())
        self.x = wave(batch * widths[0], 1.0, 9.0).reshape(batch, widths[0])
        self.y = torch.arange(batch) % 10
        self.strength = strength
        # Decay is done by hand: inside AdamW it would be damped with the rate.
        self.optimizer = torch.optim.AdamW(self.params, lr=LR, weight_decay=0.0, foreach=foreach)

    def loss(self):
        return torch.nn.functional.cross_entropy(self.model(self.x), self.y)

    @torch.no_grad()
    def damping(self, center):
        slopes = []
        backup = [p.clone() for p in self.params]
        for _ in range(PROBES):
            for p in self.params:
                u = torch.randn_like(p)
                p.add_(u, alpha=SIGMA / (u.norm().item() + 1e-12))
            slopes.append((self.loss().item() - center) / SIGMA)
            for p, b in zip(self.params, backup):
                p.copy_(b)
        mean = sum(slopes) / PROBES
        variance = sum((d - mean) ** 2 for d in slopes) / (PROBES - 1)
        square = sum(d * d for d in slopes) / PROBES
        return math.exp(-self.strength * min(variance / (square + ZETA), CAP))

    def step(self):
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        damping = self.damping(loss.item())
        with torch.no_grad():
            torch._foreach_mul_(self.params, 1.0 - LR * DECAY)
        for group in self.optimizer.param_groups:
            group["lr"] = LR * damping
        self.optimizer.step()
        return damping


def main(threads):
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    trainings = {net: Training(net, False) for net in NETS}
    trainings |= {net + "-foreach": Training(net, True) for net in NETS}
    print("ready", torch.__version__, flush=True)
    for line in sys.stdin:
        words = line.split()
        if words[0] == "quit":
            return
        task, net, steps = words[0], words[1], int(words[2])
        if task == "loss":
            fresh = Training(net, False, strength=0.0)
            for _ in range(steps):
                fresh.step()
            with torch.no_grad():
                print(fresh.loss().item(), flush=True)
        elif task == "damping":
            fresh = Training(net, False)
            print(sum(fresh.step() for _ in range(steps)) / steps, flush=True)
        else:
            start = time.perf_counter()
            for _ in range(steps):
                trainings[net].step()
            print((time.perf_counter() - start) / steps, flush=True)


main(int(sys.argv[1]))
