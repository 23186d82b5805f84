"""Trainer callbacks, one per file; attached by `opsd_train.py` alone."""
