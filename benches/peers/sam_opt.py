"""Times pytorch_optimizer's SAM beside ours.

Started by `tessera-bench` as a child process. Each line on standard input asks for one round, each line on standard
output answers it:

    time NET STEPS     ->  seconds per step
    loss NET STEPS     ->  the loss after that many steps from the start
    quit
"""

import sys
import time

import torch
from pytorch_optimizer import SAM

NETS = {"small": ([64, 128, 128, 10], 64), "large": ([784, 2048, 2048, 2048, 10], 256)}


def wave(count, scale, phase):
    """The numbers that both sides start from: a sine, in double precision, rounded to single."""
    index = torch.arange(count, dtype=torch.float64)
    return (scale * torch.sin(index * 0.7 + phase)).float()


class Training:
    def __init__(self, net):
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
        self.optimizer = SAM(self.model.parameters(), torch.optim.SGD, rho=0.05, lr=0.01, momentum=0.9)

    def forward_backward(self):
        self.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.model(self.x), self.y)
        loss.backward()
        return loss

    def step(self):
        loss = self.forward_backward()
        self.optimizer.step(self.forward_backward)
        return loss


def main(threads):
    torch.set_num_threads(threads)
    trainings = {net: Training(net) for net in NETS}
    print("ready", torch.__version__, flush=True)
    for line in sys.stdin:
        words = line.split()
        if words[0] == "quit":
            return
        task, net, steps = words[0], words[1], int(words[2])
        if task == "loss":
            fresh = Training(net)
            for _ in range(steps):
                fresh.step()
            with torch.no_grad():
                print(torch.nn.functional.cross_entropy(fresh.model(fresh.x), fresh.y).item(), flush=True)
            continue
        start = time.perf_counter()
        for _ in range(steps):
            trainings[net].step()
        print((time.perf_counter() - start) / steps, flush=True)


main(int(sys.argv[1]))
