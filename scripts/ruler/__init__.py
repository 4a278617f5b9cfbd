"""The 13 tasks of RULER [Hsieh et al. 2024, arXiv:2404.06654; NVIDIA/RULER] for any tokenizer, and its metric.

Prompts, answer prefixes, sizes and tokens to generate are RULER's, for these are the tasks' definitions; how a sample
is drawn, measured and fitted to its length is our own, and ``tasks.py`` says where it differs.
"""

from ruler.haystacks import HAYSTACKS, Texts
from ruler.metric import score, wilson_interval
from ruler.tasks import TASKS, Sample, make_sample, missing_text

__all__ = ["HAYSTACKS", "TASKS", "Sample", "Texts", "make_sample", "missing_text", "score", "wilson_interval"]
