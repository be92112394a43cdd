"""The demo: text lines rendered to images and read again by a real OCR model."""

from __future__ import annotations

OCR_TEXTS = "ocr_texts"
"""Name of the demo's inference asset."""
