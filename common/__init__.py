"""What the five scripts share: nouns only, no strategy.

Nothing in this package imports torch.distributed, Horovod, Apex or torch.nn.parallel;
it is told rank and world size as plain integers.
"""
