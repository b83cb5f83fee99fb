"""Tasks: model folders of Hugging Face with their data, preprocessing, metrics and answers."""
