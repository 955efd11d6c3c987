"""Code that all five scripts share: data, model, meters and checkpoint.

Nothing here imports torch.distributed, Horovod, Apex or torch.nn.parallel. You can
delete tar.py if your images are in folders, and nvimgcodec.py if you do not use it.
"""
