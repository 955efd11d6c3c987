"""Code that all five scripts share: data, model, meters and checkpoint.

Nothing here imports torch.distributed, Horovod, Apex or torch.nn.parallel; the scripts
pass ranks as plain integers. tar.py and nvimgcodec.py are optional: delete them if your
images are in folders and --decoder nvimgcodec is not for you.
"""
