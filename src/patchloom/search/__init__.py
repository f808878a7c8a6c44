"""Search by image: the index on disk, queries, classification by neighbours, evaluation, galleries and clusters.

`storage` is the format of an index, `building` makes one, `index.Index` answers queries and takes further images,
`conditions` ranks under a coarse label, `evaluation` measures rankings. Imports `inference` and what is below it.
"""
