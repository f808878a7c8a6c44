"""The training procedures of the papers as typed values with their sources, one file per paper, and changes to them.
Imports models and data; nothing here trains."""
