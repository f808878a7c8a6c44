"""Names that recipes and transforms share; importing them costs nothing."""

THREE_AUGMENT = ("gray", "solarize", "blur")  # the parts of 3-Augment, one of which an image gets
MOST_WORKERS = 512  # worker processes at most
