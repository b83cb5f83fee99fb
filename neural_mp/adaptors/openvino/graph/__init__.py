"""Edits of OpenVINO graphs, integer weights and recurrent sequences."""
