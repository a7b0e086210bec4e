"""What the whole suite shares: one Ray session, one model that is tiny, free ports, temporary folders."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
