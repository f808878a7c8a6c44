"""Why a model predicts what it predicts: attention maps, saliency, faithfulness scores and analyses of whole networks.
Imports tasks and everything below them."""
