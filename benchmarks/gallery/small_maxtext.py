"""Settings of a small MaxText decoder on synthetic tokens, without checkpoints, for all of its trainers."""

SMALL = {
    "dataset_type": "synthetic",
    "enable_checkpointing": False,
    "steps": 4,
    "base_num_decoder_layers": 4,
    "base_emb_dim": 128,
    "base_mlp_dim": 512,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 4,
    "head_dim": 32,
    "per_device_batch_size": 4,
    "max_target_length": 128,
    "vocab_size": 1024,
    "attention": "dot_product",
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
}
