"""Image classification: training, distillation, fine-tuning, evaluation, report and prediction. Only the registry in
`patchloom.tasks` knows this folder."""
