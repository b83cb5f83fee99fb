"""Scripts of the forms of Intel Neural Compressor's BERT examples: transformers and ONNX."""

import json

import numpy as np
import onnx
import pytest
import torch
from inc_script import run

pytestmark = pytest.mark.slow

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "dog", "sat", "ran", "the", ".")


@pytest.fixture(scope="module")
def bert():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        num_labels=2,
    )
    return transformers.BertForSequenceClassification(config).eval()


def test_transformers_glue(tmp_path, bert, monkeypatch):
    """Version 2, with an evaluation function and batches as a collator of transformers makes."""
    monkeypatch.setattr("builtins.model_of_the_test", bert, raising=False)
    done = run(
        tmp_path,
        """
        import numpy as np
        import torch
        from torch.utils.data import DataLoader

        model = model_of_the_test
        random = np.random.default_rng(0)
        samples = [
            {
                "input_ids": torch.from_numpy(random.integers(5, 12, 16)),
                "attention_mask": torch.ones(16, dtype=torch.int64),
                "labels": torch.tensor(int(random.integers(2))),
            }
            for _ in range(32)
        ]
        eval_dataloader = DataLoader(samples, batch_size=8)
        with torch.no_grad():
            truth = [model(**batch).logits.argmax(-1) for batch in eval_dataloader]

        def eval_func(model):
            right = total = 0
            with torch.no_grad():
                for batch, wanted in zip(eval_dataloader, truth):
                    logits = model(**batch)["logits"]
                    right += int((logits.argmax(-1) == wanted).sum())
                    total += len(wanted)
            return right / total

        from neural_mp.compat.inc import PostTrainingQuantConfig, quantization
        from neural_mp.compat.inc.config import AccuracyCriterion, TuningCriterion

        conf = PostTrainingQuantConfig(
            approach="dynamic",
            backend="ipex",
            tuning_criterion=TuningCriterion(max_trials=5),
            accuracy_criterion=AccuracyCriterion(criterion="absolute", tolerable_loss=0.2),
        )
        q_model = quantization.fit(
            model, conf=conf, calib_dataloader=eval_dataloader, eval_func=eval_func
        )
        q_model.save("saved_results")
        """,
    )
    assert done["eval_func"](done["q_model"].model) >= 0.8
    assert (tmp_path / "saved_results" / "plan.yaml").is_file()


def test_onnx_bert(tmp_path, bert):
    """`GLUE` from local files, in YAML, with the metric of the task; dynamic INT8."""
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer/vocab.txt").write_text("\n".join(WORDS))
    (tmp_path / "tokenizer/config.json").write_text(json.dumps({"model_type": "bert"}))
    random = np.random.default_rng(0)
    rows = ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"]
    for number in range(24):
        first, second = (" ".join(random.choice(WORDS[5:], 4)) for _ in range(2))
        rows.append(f"{random.integers(2)}\t{number}\t{number}\t{first}\t{second}")
    (tmp_path / "dev.tsv").write_text("\n".join(rows) + "\n")
    ids = torch.ones(2, 16, dtype=torch.int64)
    torch.onnx.export(
        bert,
        (ids, ids, 0 * ids),
        str(tmp_path / "bert.onnx"),
        input_names=["input_ids", "input_mask", "segment_ids"],
        output_names=["logits"],
        dynamic_shapes=({0: torch.export.Dim("batch")},) * 3,
        opset_version=18,
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    (tmp_path / "conf.yaml").write_text(
        f"""
version: 1.0
model: {{name: bert, framework: onnxrt_integerops}}
quantization: {{approach: post_training_dynamic_quant}}
evaluation:
  accuracy:
    metric: {{GLUE: {{task: mrpc}}}}
    dataloader:
      batch_size: 8
      dataset:
        GLUE:
          data_dir: {tmp_path}
          model_name_or_path: {tmp_path / "tokenizer"}
          max_seq_length: 16
          task: mrpc
          model_type: bert
          dynamic_length: False
tuning:
  accuracy_criterion: {{absolute: 0.2}}
  exit_policy: {{timeout: 0}}
"""
    )
    done = run(
        tmp_path,
        """
        import sys
        import onnx
        from neural_mp.compat.inc.experimental import Quantization, common

        quantize = Quantization(sys.argv[2])
        quantize.model = common.Model(onnx.load(sys.argv[1]))
        q_model = quantize()
        q_model.save(sys.argv[3])
        """,
        *(str(tmp_path / name) for name in ("bert.onnx", "conf.yaml", "int8.onnx")),
    )
    assert 0 <= done["q_model"].report.accuracy <= 1
    assert onnx.load(tmp_path / "int8.onnx").graph.node
