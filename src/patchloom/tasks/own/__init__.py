"""Training with parts of the user's own: a module, a data set, a loss, an augmentation, or a whole task. Such runs are
started from Python; only the registry in `patchloom.tasks` knows this folder."""
