"""Policies by name."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {
        "rule": [
            {
                "layers": "*",
                **dict.fromkeys(("weights", "activations", "errors", "outputs"), "bf16"),
                "weight_gradients": "bf16",
            }
        ]
    },
}
