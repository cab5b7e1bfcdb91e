import pykv
from pykv.cli.catalog import model_path

with pykv.Model.load(model_path("gemma3-270m")) as model, model.context(n_ctx=2048, n_ubatch=64) as ctx:
    memory, encode = ctx.memory, model.tokenizer.encode
    start = encode("The keeper of the lighthouse counted its steps every evening. " * 30)[:256]
    ctx.decode(pykv.Batch(start, logits="none"))
    with memory.snapshot(0) as kept:
        more = encode("Then the fog came in, and he counted the ships. " * 90, add_bos=False)[:800]
        ctx.decode(pykv.Batch(more, logits="none"))
        can = memory.resumable(0, len(start))
        print(bool(can), can.largest, can.detail)  # a window has lost what a token after `start` would see
        memory.restore(0, kept)
        print(f"back from {len(start + more)} tokens to {memory.pos_max(0) + 1}: {kept.nbytes / 1024:.0f} KiB kept")
    ctx.decode(pykv.Batch(encode(" There were", add_bos=False)))
    print(repr(model.tokenizer.decode([int(ctx.logits[-1].argmax())])))
