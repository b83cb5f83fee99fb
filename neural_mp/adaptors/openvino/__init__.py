"""The OpenVINO adaptor."""
