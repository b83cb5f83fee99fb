"""Pipelines of scikit-learn, converted to ONNX by `skl2onnx`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from zoo_cases.case import NotBuiltError, ZooCase

SAMPLES, FEATURES = 64, 8


def _estimators() -> dict[str, Any]:
    from sklearn import (
        cluster,
        decomposition,
        ensemble,
        linear_model,
        naive_bayes,
        neighbors,
        neural_network,
        svm,
        tree,
    )

    small = {"random_state": 0}
    return {
        "AdaBoostClassifier": ensemble.AdaBoostClassifier(n_estimators=4, **small),
        "DecisionTreeClassifier": tree.DecisionTreeClassifier(max_depth=4, **small),
        "GaussianNB": naive_bayes.GaussianNB(),
        "GradientBoostingClassifier": ensemble.GradientBoostingClassifier(n_estimators=4, **small),
        "GradientBoostingRegressor": ensemble.GradientBoostingRegressor(n_estimators=4, **small),
        "KMeans": cluster.KMeans(3, **small),
        "KNeighborsClassifier": neighbors.KNeighborsClassifier(3),
        "LinearRegression": linear_model.LinearRegression(),
        "LogisticRegression": linear_model.LogisticRegression(),
        "MLPClassifier": neural_network.MLPClassifier((16, 16), max_iter=50, **small),
        "MLPRegressor": neural_network.MLPRegressor(
            hidden_layer_sizes=(16, 16), max_iter=50, **small
        ),
        "PCA": decomposition.PCA(3),
        "RandomForestClassifier": ensemble.RandomForestClassifier(4, max_depth=4, **small),
        "SVC": svm.SVC(probability=True, **small),
        "SVR": svm.SVR(),
    }


def names() -> list[str]:
    """Return the names of the last steps of the pipelines."""
    return sorted(_estimators())


def build(name: str, seed: int, batches: int, folder: Path | None = None) -> ZooCase:
    """Return a fitted pipeline as an ONNX file.

    Raises:
        NotBuiltError: `skl2onnx` does not convert the pipeline.
    """
    import onnxruntime
    import skl2onnx
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    numbers = np.random.default_rng(seed)
    samples = numbers.standard_normal((SAMPLES, FEATURES)).astype(np.float32)
    pipeline = make_pipeline(StandardScaler(), _estimators()[name])
    pipeline.fit(samples, (samples.sum(axis=1) > 0).astype(np.int64))
    try:
        model = skl2onnx.to_onnx(pipeline, samples[:1])
    except Exception as error:
        raise NotBuiltError(f"skl2onnx: {error}") from error
    content = model.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    (input_name,) = (value.name for value in session.get_inputs())
    data = [numbers.standard_normal((16, FEATURES)).astype(np.float32) for _ in range(batches)]
    single = len(session.get_outputs()) == 1

    def run(batch: Any) -> Any:
        results = session.run(None, batch)
        return results[0] if single else results

    return ZooCase(model, [{input_name: batch} for batch in data], run, "fitted to random samples")
