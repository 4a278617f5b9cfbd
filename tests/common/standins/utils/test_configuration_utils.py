"""Stands in for a table of transformers' tests: fields that every configuration takes, with values of no default."""

config_common_kwargs = {
    "return_dict": False,
    "output_hidden_states": True,
    "output_attentions": True,
    "dtype": "float16",
    "chunk_size_feed_forward": 5,
    "architectures": ["AnyModel"],
    "id2label": {0: "first"},
    "label2id": {"first": 0},
    "problem_type": "regression",
}
