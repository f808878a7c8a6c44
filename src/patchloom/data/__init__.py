"""Images and their targets, from the file to the batch. Knows no task.

    sources, own        what a source is; files, arrays, a user's own dataset
    opening             open_source: folders, manifest, shards, huggingface, torchvision_sets, digits (with listing)
    splits, levels      what to train on and what to hold out; label columns as a hierarchy
    decoding, jpeg      encoded images to pixels          native      the same steps as Pillow's, in C++
    images              from a picture to a network's input
    transforms, mixing  augmentation of an image; erasing, Mixup and CutMix of a batch
    order, randomness   which images are in which batch; every draw from a seed of its own
    loader, collating, workers   samples, batches, and the processes that read them
    check, scan         what is wrong with a data set     samples     photos of installed packages

Imports models (for preprocessing), kernels and what lies below; everything from recipes up may import it.
"""
