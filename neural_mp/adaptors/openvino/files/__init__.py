"""OpenVINO models in files: load, check, save."""
