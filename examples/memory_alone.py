"""A memory without a model: what do three conversations over one long prompt cost?

The shapes are those of an 8-billion Llama; nothing is computed, and no weights are needed.
"""

from pykv.batch import Batch, BatchLimits, validate
from pykv.memory import KVCache, KVSettings, LayerSpec, MemorySpec

N_VOCAB, N_SEQ = 128_256, 3
LIMITS = BatchLimits(n_tokens_max=1024, n_vocab=N_VOCAB, n_seq_max=N_SEQ)


def store(cache: KVCache, n_tokens: int, seq_id: int) -> None:
    """Give cells to the next `n_tokens` tokens of a sequence, as a decode would."""
    valid = validate(Batch([0] * n_tokens, seq_id=seq_id), LIMITS, cache)
    plan = cache.init_batch(valid, n_ubatch=512)
    if plan is None:
        raise SystemExit(f"{n_tokens} tokens do not fit")
    for i in range(len(plan.ubatches)):
        plan.apply(i)


def main() -> None:
    """Fork a prompt of 700 tokens twice, let each branch say 50, and end one of them."""
    spec = MemorySpec.uniform(32, LayerSpec(n_head_kv=8, n_embd_head_k=128, n_embd_head_v=128))
    settings = KVSettings(n_cells=1024, n_seq_max=N_SEQ, type_k="q8_0", type_v="q8_0")
    with KVCache(spec, settings) as cache:
        store(cache, 700, seq_id=0)
        for branch in (1, 2):
            cache.seq_cp(0, branch)
        for seq_id in range(N_SEQ):
            store(cache, 50, seq_id)
        per_cell = cache.nbytes // cache.n_cells
        used = cache.cells().n_used
        print(f"three branches: {used} cells, {used * per_cell / 2**20:.1f} MiB; unshared they would take 2250")
        cache.seq_rm(1)
        print(f"one ended: {cache.cells().n_used} cells, the prompt stays for the others")


if __name__ == "__main__":
    main()
