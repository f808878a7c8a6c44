"""Training with parts of the user's own: a module, a data set, a loss, an augmentation, or a whole task. Such runs are
started from Python; below `api`, only the registry in `patchloom.tasks` imports this folder. Networks of ours are
trained and applied by `tasks.classification`."""
