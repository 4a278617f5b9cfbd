"""Keeps pytest away from the fetched files themselves, and knows the markers that they use."""

collect_ignore = ["source", "standins"]

MARKERS = (
    "accelerate_tests",
    "flash_attn_3_test",
    "flash_attn_4_test",
    "flash_attn_test",
    "is_tensor_parallel_test",
    "is_training_test",
    "order",
    "torch_compile_test",
)


def pytest_configure(config):
    for marker in MARKERS:
        config.addinivalue_line("markers", f"{marker}: set by transformers' common tests")
