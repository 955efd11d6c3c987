"""Code that all five scripts share: data, model, checkpoint and log, but no strategy.

Nothing in this package imports torch.distributed, Horovod, Apex or torch.nn.parallel;
callers pass rank and world size as plain integers. A problem that the user can fix,
such as a wrong flag, a missing folder or a damaged image, raises UserError.
"""
