"""Image classification: training, distillation, fine-tuning, evaluation, report and prediction. The registry in
`patchloom.tasks`, `tasks.own`, `tasks.retrieval`, `tasks.pretraining`, `explaining` and `api` import this folder;
nothing else does."""
