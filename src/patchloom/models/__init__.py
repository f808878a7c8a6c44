"""The networks of the papers, by name. Importing this package fills the registry, in the order of the papers."""

from patchloom.models import deit, deit3, parallel, cait, resmlp, patchconvnet, convnet, nano, translation  # noqa: F401, I001
