"""`neural_compressor.evaluation.lm_eval`: tasks of the package lm-eval."""

from __future__ import annotations

from typing import Any

from neural_mp.metrics.lm_eval_task import task_results


class LMEvalParser:
    """Options of an evaluation.

    Args:
        model: kind of model in lm-eval.
        tasks: names of tasks, separated by commas.
        model_args: options of the model, as in lm-eval.
        user_model: the model to evaluate, instead of the one that `model_args` names.
        tokenizer: its tokenizer.
        **options: further options: `num_fewshot`, `batch_size`, `limit`.
    """

    def __init__(
        self,
        model: str = "hf",
        tasks: str = "lambada_openai",
        model_args: str = "",
        user_model: Any = None,
        tokenizer: Any = None,
        **options: Any,
    ) -> None:
        self.model, self.tasks, self.model_args = model, tasks, model_args
        self.user_model, self.tokenizer = user_model, tokenizer
        self.num_fewshot = options.get("num_fewshot")
        self.batch_size = options.get("batch_size", 1)
        self.limit = options.get("limit")
        self.options = options


def evaluate(args: LMEvalParser) -> dict[str, Any]:
    """Return the results of lm-eval.

    Raises:
        MissingFrameworkError: lm-eval is not installed.
    """
    options: dict[str, Any] = {
        "num_fewshot": args.num_fewshot,
        "batch_size": args.batch_size,
        "limit": args.limit,
    }
    tasks = args.tasks.split(",")
    if args.user_model is None:
        return task_results(args.model, tasks, model_args=args.model_args, **options)
    return task_results(args.user_model, tasks, tokenizer=args.tokenizer, **options)
