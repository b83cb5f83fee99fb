"""Model folders of `transformers`, tiny and trained in seconds, with data files of their tasks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from scipy.io import wavfile
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
GOOD = ["good", "fine", "great", "nice"]
BAD = ["bad", "poor", "awful", "dull"]
PEOPLE = ["anna", "bert", "carl", "dora"]
REST = [f"w{number}" for number in range(48)]
WORDS = [*SPECIAL, *GOOD, *BAD, *PEOPLE, *REST]
SIZES: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}
STEPS = 60


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def make_tokenizer() -> Any:
    backend = Tokenizer(WordLevel({w: n for n, w in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = Whitespace()
    backend.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=64,
    )


def train(
    model: Any, loss_of_batch: Callable[[np.random.Generator], torch.Tensor], steps: int = STEPS
) -> Any:
    """Minimize a loss on new random batches."""
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    random = np.random.default_rng(1)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of_batch(random).backward()
        optimizer.step()
    return model.eval()


def save(folder: Path, model: Any, processor: Any) -> Path:
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def sentence(random: np.random.Generator, kind: str | None = None) -> str:
    words = list(random.choice(REST, random.integers(3, 12)))
    if kind is not None:
        words.insert(
            int(random.integers(len(words))), str(random.choice(GOOD if kind == "good" else BAD))
        )
    return " ".join(words)


def opinions(random: np.random.Generator, count: int) -> list[dict[str, Any]]:
    kinds = random.choice(["bad", "good"], count)
    return [{"text": sentence(random, kind), "label": str(kind)} for kind in kinds]


def decoder(folder: Path) -> Path:
    """A decoder that counts: after each word of `REST` comes the next."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SIZES, bos_token_id=2, eos_token_id=3, pad_token_id=0, tie_word_embeddings=False
    )
    model = transformers.LlamaForCausalLM(config)
    first = WORDS.index(REST[0])

    def loss(random: np.random.Generator) -> torch.Tensor:
        starts = random.integers(0, len(REST), (32, 1))
        ids = torch.tensor(first + (starts + np.arange(12)) % len(REST))
        return model(input_ids=ids, labels=ids).loss

    return save(folder, train(model, loss), make_tokenizer())


def counted(random: np.random.Generator, count: int) -> str:
    starts = random.integers(0, len(REST), count)
    return "\n".join(
        " ".join(REST[(start + step) % len(REST)] for step in range(16)) for start in starts
    )


def text_classifier(folder: Path) -> Path:
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    names = {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
    config = transformers.BertConfig(**SIZES, **names)
    model = transformers.BertForSequenceClassification(config)

    def loss(random: np.random.Generator) -> torch.Tensor:
        rows = opinions(random, 32)
        encoded = tokenizer([row["text"] for row in rows], return_tensors="pt", padding=True)
        labels = torch.tensor([int(row["label"] == "good") for row in rows])
        return model(**encoded, labels=labels).loss

    return save(folder, train(model, loss), tokenizer)


def tagged(random: np.random.Generator, count: int) -> list[dict[str, Any]]:
    """Sentences with the names of people, some of two words."""
    rows = []
    for _ in range(count):
        words, tags = [], []
        for _ in range(int(random.integers(2, 5))):
            words += list(map(str, random.choice(REST, random.integers(1, 4))))
            tags += ["O"] * (len(words) - len(tags))
            name = [str(random.choice(PEOPLE[:2])), str(random.choice(PEOPLE[2:]))]
            name = name[: int(random.integers(1, 3))]
            words += name
            tags += ["B-PER", "I-PER"][: len(name)]
        rows.append({"tokens": words, "tags": tags})
    return rows


def token_classifier(folder: Path) -> Path:
    torch.manual_seed(0)
    tokenizer, names = make_tokenizer(), ["O", "B-PER", "I-PER"]
    labels = {"id2label": dict(enumerate(names)), "label2id": {n: i for i, n in enumerate(names)}}
    model = transformers.BertForTokenClassification(transformers.BertConfig(**SIZES, **labels))

    def loss(random: np.random.Generator) -> torch.Tensor:
        rows = tagged(random, 32)
        encoded = tokenizer(
            [row["tokens"] for row in rows],
            is_split_into_words=True,
            return_tensors="pt",
            padding=True,
        )
        classes = torch.full(encoded["input_ids"].shape, -100)
        for index, row in enumerate(rows):
            tags = torch.tensor([names.index(tag) for tag in row["tags"]])
            classes[index, 1 : 1 + len(tags)] = tags
        return model(**encoded, labels=classes).loss

    return save(folder, train(model, loss), tokenizer)


def alike(random: np.random.Generator, count: int) -> list[dict[str, Any]]:
    """Pairs whose score is the share of common words."""
    rows = []
    for _ in range(count):
        words = random.choice(REST, 8, replace=False)
        common = int(random.integers(9))
        others = [*words[:common], *random.choice(REST, 8 - common)]
        score = len(set(words) & set(others)) / 8
        rows.append({"sentence1": " ".join(words), "sentence2": " ".join(others), "score": score})
    return rows


def sentence_encoder(folder: Path) -> Path:
    """An encoder with the steps of sentence-transformers; embeddings of random weights do."""
    torch.manual_seed(0)
    save(folder, transformers.BertModel(transformers.BertConfig(**SIZES)).eval(), make_tokenizer())
    kinds = ["Transformer", "Pooling", "Normalize"]
    modules = [
        {
            "idx": n,
            "name": str(n),
            "path": f"{n}_{kind}" if n else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for n, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    return folder


def ranked(random: np.random.Generator, count: int) -> list[dict[str, Any]]:
    """Three passages for each query; the relevant one has its first word."""
    rows = []
    for number in range(count):
        query = f"{random.choice(REST)} {random.choice(REST)} w{number % 48}"
        for position in range(3):
            passage = sentence(random)
            if position == 1:
                passage = f"{query.split()[0]} {passage}"
            rows.append({"query": query, "passage": passage, "label": int(position == 1)})
    return rows


def reranker(folder: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, num_labels=1)
    model = transformers.BertForSequenceClassification(config)
    return save(folder, model.eval(), make_tokenizer())


def asked(random: np.random.Generator, count: int) -> list[dict[str, Any]]:
    """Question about the one name in the text, with the name as the answer."""
    rows = []
    for _ in range(count):
        name = str(random.choice(PEOPLE))
        context = f"{sentence(random)} {name} {sentence(random)}"
        answers = {"text": [name], "answer_start": [context.index(name)]}
        rows.append({"question": "w1 w2", "context": context, "answers": answers})
    return rows


def question_answerer(folder: Path) -> Path:
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model = transformers.BertForQuestionAnswering(transformers.BertConfig(**SIZES))

    def loss(random: np.random.Generator) -> torch.Tensor:
        rows = asked(random, 32)
        encoded = tokenizer(
            [row["question"] for row in rows],
            text_pair=[row["context"] for row in rows],
            return_tensors="pt",
            padding=True,
        )
        people = torch.tensor([WORDS.index(name) for name in PEOPLE])
        places = torch.isin(encoded["input_ids"], people).int().argmax(dim=1)
        return model(**encoded, start_positions=places, end_positions=places).loss

    return save(folder, train(model, loss), tokenizer)


def pictures(folder: Path, random: np.random.Generator, count: int) -> Path:
    """A folder of pictures for each class: a bright upper or lower half."""
    for number in range(count):
        kind = ("lower", "upper")[number % 2]
        (folder / kind).mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture(random, kind)).save(folder / kind / f"{number}.png")
    return folder


def picture(random: np.random.Generator, kind: str) -> np.ndarray:
    pixels = random.integers(0, 120, (24, 20, 3))
    pixels[slice(0, 12) if kind == "upper" else slice(12, 24)] += 100
    return pixels.astype(np.uint8)


def image_classifier(folder: Path) -> Path:
    torch.manual_seed(0)
    processor = transformers.ViTImageProcessor(size={"height": 16, "width": 16})
    sizes = {key: SIZES[key] for key in ("hidden_size", "num_hidden_layers", "intermediate_size")}
    names = {"id2label": {0: "lower", 1: "upper"}, "label2id": {"lower": 0, "upper": 1}}
    model = transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, num_attention_heads=2, image_size=16, patch_size=4, **names)
    )

    def loss(random: np.random.Generator) -> torch.Tensor:
        kinds = random.integers(0, 2, 16)
        images = [picture(random, ("lower", "upper")[kind]) for kind in kinds]
        pixels = processor(images, return_tensors="pt")["pixel_values"]
        return model(pixels, labels=torch.tensor(kinds)).loss

    return save(folder, train(model, loss), processor)


def sounds(folder: Path, random: np.random.Generator, count: int) -> Path:
    """A folder of sound for each class: low or high tones, of half the rate of the model."""
    for number in range(count):
        kind = ("high", "low")[number % 2]
        (folder / kind).mkdir(parents=True, exist_ok=True)
        wave = tone(random, kind, 4000)
        wavfile.write(folder / kind / f"{number}.wav", 4000, (wave * 20000).astype(np.int16))
    return folder


def tone(random: np.random.Generator, kind: str, rate: int) -> np.ndarray:
    frequency = random.uniform(600, 900) if kind == "high" else random.uniform(100, 250)
    times = np.arange(int(rate * random.uniform(0.1, 0.16))) / rate
    return np.sin(2 * np.pi * frequency * times).astype(np.float32)


def audio_classifier(folder: Path) -> Path:
    torch.manual_seed(0)
    extractor = transformers.Wav2Vec2FeatureExtractor(sampling_rate=8000)
    config = transformers.Wav2Vec2Config(
        **{key: value for key, value in SIZES.items() if "position" not in key},
        conv_dim=(32, 32),
        conv_kernel=(10, 8),
        conv_stride=(5, 4),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        classifier_proj_size=32,
        id2label={0: "high", 1: "low"},
        label2id={"high": 0, "low": 1},
        mask_time_prob=0.0,
    )
    model = transformers.Wav2Vec2ForSequenceClassification(config)

    def loss(random: np.random.Generator) -> torch.Tensor:
        kinds = random.integers(0, 2, 8)
        waves = [tone(random, ("high", "low")[kind], 8000) for kind in kinds]
        values = extractor(waves, sampling_rate=8000, padding=True, return_tensors="pt")
        return model(values["input_values"], labels=torch.tensor(kinds)).loss

    return save(folder, train(model, loss), extractor)


def scenes(folder: Path, random: np.random.Generator, count: int) -> Path:
    """Pictures with a bright square, its box and its mask."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        pixels, mask, box = scene(random)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        Image.fromarray(mask).save(folder / f"{number}_mask.png")
        row = {"file_name": f"{number}.png", "mask": f"{number}_mask.png"}
        rows.append({**row, "objects": {"bbox": [box], "category": [1]}})
    write_rows(folder / "metadata.jsonl", rows)
    return folder


def scene(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray, list[int]]:
    pixels = random.integers(0, 80, (32, 32, 3)).astype(np.uint8)
    side = int(random.integers(10, 18))
    x, y = (int(value) for value in random.integers(0, 32 - side, 2))
    pixels[y : y + side, x : x + side] += 150
    mask = np.zeros((32, 32), np.uint8)
    mask[y : y + side, x : x + side] = 1
    return pixels, mask, [x, y, side, side]


def segmenter(folder: Path) -> Path:
    torch.manual_seed(0)
    processor = transformers.SegformerImageProcessor(size={"height": 32, "width": 32})
    config = transformers.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=32,
        id2label={0: "ground", 1: "square"},
        label2id={"ground": 0, "square": 1},
    )
    model = transformers.SegformerForSemanticSegmentation(config)

    def loss(random: np.random.Generator) -> torch.Tensor:
        images, masks, _ = zip(*(scene(random) for _ in range(8)), strict=True)
        pixels = processor(list(images), return_tensors="pt")["pixel_values"]
        return model(pixels, labels=torch.tensor(np.stack(masks)).long()).loss

    return save(folder, train(model, loss), processor)


def detector(folder: Path) -> Path:
    torch.manual_seed(0)
    processor = transformers.YolosImageProcessor(size={"height": 32, "width": 32})
    config = transformers.YolosConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        image_size=[32, 32],
        patch_size=8,
        num_detection_tokens=4,
        id2label={0: "circle", 1: "square"},
        label2id={"circle": 0, "square": 1},
    )
    model = transformers.YolosForObjectDetection(config)

    def loss(random: np.random.Generator) -> torch.Tensor:
        images, _, boxes = zip(*(scene(random) for _ in range(16)), strict=True)
        pixels = processor(list(images), return_tensors="pt")["pixel_values"]
        corners = torch.tensor(boxes, dtype=torch.float32) / 32
        targets = torch.cat([corners[:, :2] + corners[:, 2:] / 2, corners[:, 2:]], dim=1)
        outputs = model(pixels)
        classes = torch.full(outputs.logits.shape[:2], 2)  # nothing
        classes[:, 0] = 1
        scores = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), classes.flatten())
        return scores + 5 * (outputs.pred_boxes[:, 0] - targets).abs().mean()

    return save(folder, train(model, loss, 4 * STEPS), processor)


def translated(random: np.random.Generator, count: int) -> list[dict[str, Any]]:
    """Opinions, whose translation are all words of their kind."""
    rows = opinions(random, count)
    words = {"good": " ".join(GOOD), "bad": " ".join(BAD[:3])}
    return [{"text": row["text"], "target": words[row["label"]]} for row in rows]


def translator(folder: Path) -> Path:
    """An encoder-decoder of BART's shape."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    config = transformers.BartConfig(
        vocab_size=len(WORDS),
        d_model=64,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
    )
    model = transformers.BartForConditionalGeneration(config)

    def loss(random: np.random.Generator) -> torch.Tensor:
        rows = translated(random, 32)
        encoded = tokenizer([row["text"] for row in rows], return_tensors="pt", padding=True)
        targets = tokenizer([row["target"] for row in rows], return_tensors="pt", padding=True)
        labels = targets["input_ids"][:, 1:].clone()
        labels[labels == 0] = -100
        return model(**encoded, labels=labels).loss

    return save(folder, train(model, loss, 2 * STEPS), tokenizer)


def spoken(folder: Path, random: np.random.Generator, count: int) -> Path:
    """Tones as files, with the words `good` for high ones and `bad` for low ones."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        kind = ("high", "low")[number % 2]
        wave = (tone(random, kind, 8000) * 20000).astype(np.int16)
        wavfile.write(folder / f"{number}.wav", 8000, wave)
        rows.append({"audio": f"{number}.wav", "text": "good fine" if kind == "high" else "bad"})
    return write_rows(folder / "data.jsonl", rows)


def recognizer(folder: Path) -> Path:
    """An encoder-decoder of Whisper's shape."""
    torch.manual_seed(0)
    extractor = transformers.WhisperFeatureExtractor(
        feature_size=16, sampling_rate=8000, hop_length=80, chunk_length=1, n_fft=200
    )
    tokenizer = make_tokenizer()
    config = transformers.WhisperConfig(
        vocab_size=len(WORDS),
        num_mel_bins=16,
        d_model=64,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=50,
        max_target_positions=24,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
        decoder_start_token_id=2,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    model.generation_config.suppress_tokens = model.generation_config.begin_suppress_tokens = None

    def loss(random: np.random.Generator) -> torch.Tensor:
        kinds = random.integers(0, 2, 16)
        waves = [tone(random, ("high", "low")[kind], 8000) for kind in kinds]
        values = extractor(waves, sampling_rate=8000, return_tensors="pt")["input_features"]
        words = [["good", "fine"] if kind == 0 else ["bad"] for kind in kinds]
        labels = torch.full((16, 3), -100)
        for row, spoken_words in zip(labels, words, strict=True):
            ids = [WORDS.index(word) for word in spoken_words] + [3]
            row[: len(ids)] = torch.tensor(ids)
        return model(values, labels=labels).loss

    train(model, loss)
    save(folder, model, tokenizer)
    extractor.save_pretrained(folder)
    return folder


def ctc_recognizer(folder: Path) -> Path:
    """An encoder of sound with the letters of its texts."""
    torch.manual_seed(0)
    folder.mkdir(parents=True)
    tokens = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abdefgino"]
    (folder / "vocab.json").write_text(json.dumps({t: n for n, t in enumerate(tokens)}))
    extractor = transformers.Wav2Vec2FeatureExtractor(sampling_rate=8000)
    tokenizer = transformers.Wav2Vec2CTCTokenizer(str(folder / "vocab.json"))
    config = transformers.Wav2Vec2Config(
        vocab_size=len(tokens),
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=128,
        conv_dim=(32, 32),
        conv_kernel=(10, 8),
        conv_stride=(5, 4),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        pad_token_id=0,
    )
    processor = transformers.Wav2Vec2Processor(extractor, tokenizer)
    return save(folder, transformers.Wav2Vec2ForCTC(config).eval(), processor)
