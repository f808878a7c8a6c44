"""Networks by name: one file per family, their configs, costs and parameter roles; copies for inference (`fused`);
networks of timm (`foreign`). Importing this package fills the registry, in the order of the papers.

May import kernels, layers and compat. Everything from weights upwards may import it.
"""

from patchloom.models import deit, deit3, parallel, cait, resmlp, patchconvnet, convnet, foreign, nano  # noqa: F401, I001
from patchloom.models import embedding, tokenizer, translation  # noqa: F401
