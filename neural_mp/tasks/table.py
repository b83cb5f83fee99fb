"""The table of tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from neural_mp.errors import ConfigurationError, did_you_mean
from neural_mp.tasks import media, texts
from neural_mp.tasks.declaration import GraphTask, Task
from neural_mp.tasks.folders import ModelFolder, list_model_classes
from neural_mp.tasks.rows import Column
from neural_mp.tasks.sequences import SequenceTask, TextGeneration

_LABEL = Column("label", ("labels",))
_TEXT = Column("text", ("sentence", "review", "content"))
_TEXT_PAIR = Column("text_pair", ("sentence2", "hypothesis"), required=False)
_IMAGE = Column("image", ("img", "pixel_values", "file_name"))
_TRANSCRIPT = Column("text", ("sentence", "transcription", "transcript"))
_AUDIO = Column("audio", ("sound", "file", "file_name"))


def _always(metric: Any) -> Callable[[ModelFolder], Any]:
    return lambda folder: metric


TASKS: Mapping[str, Task] = {
    task.name: task
    for task in (
        GraphTask(
            name="text-classification",
            auto_class="AutoModelForSequenceClassification",
            processor="AutoTokenizer",
            inputs=(Column("text", (*_TEXT.aliases, "sentence1", "premise")), _TEXT_PAIR),
            labels=(_LABEL,),
            encode=texts.encode_texts,
            read_truth=texts.read_class,
            decode=texts.decode_classes,
            answer=texts.answer_classes,
            choose_metric=texts.choose_class_metric,
            join_truth=texts.join_numbers,
        ),
        GraphTask(
            name="token-classification",
            auto_class="AutoModelForTokenClassification",
            processor="AutoTokenizer",
            inputs=(Column("tokens", ("words",)),),
            labels=(Column("tags", ("ner_tags", "pos_tags", "labels")),),
            encode=texts.encode_words,
            read_truth=texts.read_tags,
            decode=texts.decode_tags,
            answer=texts.answer_spans,
            choose_metric=_always("span_f1"),
        ),
        GraphTask(
            name="sentence-similarity",
            auto_class="AutoModel",
            processor="AutoTokenizer",
            inputs=(Column("sentence1", ("text", "sentence", "premise")), Column("sentence2")),
            labels=(Column("score", ("label", "similarity_score")),),
            encode=texts.encode_sentences,
            read_truth=texts.read_similarity,
            decode=texts.decode_embeddings,
            answer=texts.answer_arrays,
            choose_metric=_always(("spearman", {"pairs": True})),
            join_truth=texts.join_numbers,
        ),
        GraphTask(
            name="feature-extraction",
            auto_class="AutoModel",
            processor="AutoTokenizer",
            inputs=(_TEXT,),
            labels=(),
            encode=texts.encode_sentences,
            read_truth=texts.read_nothing,
            decode=texts.decode_embeddings,
            answer=texts.answer_arrays,
            choose_metric=_always("cosine"),
        ),
        GraphTask(
            name="text-ranking",
            auto_class="AutoModelForSequenceClassification",
            processor="AutoTokenizer",
            inputs=(Column("query", ("question",)), Column("passage", ("document", "text"))),
            labels=(Column("label", ("relevance", "score")),),
            encode=texts.encode_texts,
            read_truth=texts.read_relevance,
            decode=texts.decode_relevance,
            answer=texts.answer_numbers,
            choose_metric=_always(("ndcg@k", {"k": 10})),
            join_truth=texts.join_relevance,
        ),
        GraphTask(
            name="question-answering",
            auto_class="AutoModelForQuestionAnswering",
            processor="AutoTokenizer",
            inputs=(Column("question"), Column("context")),
            labels=(Column("answers", ("answer",)),),
            encode=texts.encode_questions,
            read_truth=texts.read_answers,
            decode=texts.decode_answers,
            answer=texts.answer_texts,
            choose_metric=_always("answer_f1"),
        ),
        GraphTask(
            name="image-classification",
            auto_class="AutoModelForImageClassification",
            processor="AutoImageProcessor",
            inputs=(_IMAGE,),
            labels=(_LABEL,),
            encode=media.encode_images,
            read_truth=texts.read_class,
            decode=texts.decode_classes,
            answer=texts.answer_classes,
            choose_metric=texts.choose_class_metric,
            join_truth=texts.join_numbers,
            media="image",
        ),
        GraphTask(
            name="object-detection",
            auto_class="AutoModelForObjectDetection",
            processor="AutoImageProcessor",
            inputs=(_IMAGE,),
            labels=(Column("objects", ("annotations",)),),
            encode=media.encode_images,
            read_truth=media.read_objects,
            decode=media.decode_boxes,
            answer=media.answer_boxes,
            choose_metric=_always("mAP"),
            media="image",
        ),
        GraphTask(
            name="image-segmentation",
            auto_class="AutoModelForSemanticSegmentation",
            processor="AutoImageProcessor",
            inputs=(_IMAGE,),
            labels=(Column("mask", ("annotation", "segmentation_mask")),),
            encode=media.encode_images,
            read_truth=media.read_mask,
            decode=media.decode_segments,
            answer=media.answer_segments,
            choose_metric=media.choose_segment_metric,
            join_truth=media.join_masks,
            media="image",
        ),
        GraphTask(
            name="audio-classification",
            auto_class="AutoModelForAudioClassification",
            processor="AutoFeatureExtractor",
            inputs=(_AUDIO,),
            labels=(_LABEL,),
            encode=media.encode_sound,
            read_truth=texts.read_class,
            decode=texts.decode_classes,
            answer=texts.answer_classes,
            choose_metric=texts.choose_class_metric,
            join_truth=texts.join_numbers,
            media="audio",
            default_batch_size=1,
        ),
        GraphTask(
            name="automatic-speech-recognition",
            auto_class="AutoModelForCTC",
            processor="AutoProcessor",
            inputs=(_AUDIO,),
            labels=(_TRANSCRIPT,),
            encode=media.encode_sound,
            read_truth=texts.read_transcript,
            decode=media.decode_speech,
            answer=texts.answer_texts,
            choose_metric=_always("wer"),
            media="audio",
            default_batch_size=1,
            variants=(
                SequenceTask(
                    name="automatic-speech-recognition",
                    auto_class="AutoModelForSpeechSeq2Seq",
                    processor="AutoProcessor",
                    inputs=(_AUDIO,),
                    labels=(_TRANSCRIPT,),
                    encode=media.encode_sound,
                    metric="wer",
                    target="text",
                    media="audio",
                ),
            ),
        ),
        SequenceTask(
            name="translation",
            auto_class="AutoModelForSeq2SeqLM",
            processor="AutoTokenizer",
            inputs=(Column("text", ("source",)),),
            labels=(Column("target", ("translation", "reference")),),
            encode=texts.encode_source,
            metric="bleu",
            target="target",
        ),
        SequenceTask(
            name="summarization",
            auto_class="AutoModelForSeq2SeqLM",
            processor="AutoTokenizer",
            inputs=(Column("text", ("document", "article", "dialogue")),),
            labels=(Column("summary", ("highlights", "target")),),
            encode=texts.encode_source,
            metric="rouge",
            target="summary",
        ),
        TextGeneration(
            name="text-generation",
            auto_class="AutoModelForCausalLM",
            processor="AutoTokenizer",
            inputs=(Column("text"),),
            default_batch_size=8,
        ),
    )
}


def find_task(name: object) -> Task:
    """Return the task of a name.

    Raises:
        ConfigurationError: there is no task of this name.
    """
    if isinstance(name, str) and name in TASKS:
        return TASKS[name]
    raise ConfigurationError(
        f"task must be one of {', '.join(TASKS)}, got {name!r}{did_you_mean(name, TASKS)}"
    )


def choose_variant(task: Task, config: Mapping[str, Any]) -> Task:
    """Return the variant of a task for the class in a configuration; by default the task."""
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    for variant in task.variants:
        if any(name in names for names in list_model_classes(variant.auto_class).values()):
            return variant
    return task
