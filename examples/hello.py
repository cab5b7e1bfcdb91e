import pykv
from pykv.cli.catalog import model_path

with pykv.Model.load(model_path("smollm2-135m")) as model, model.context(n_ctx=512, n_seq_max=2) as ctx:
    ctx.decode(pykv.Batch(model.tokenizer.encode("The sea is"), logits="none"))
    ctx.memory.seq_cp(0, 1, 0, -1)  # fork: sequence 1 shares the cells of sequence 0
    for seq_id, text in enumerate((" deep and", " full of")):
        said = model.tokenizer.encode(text)
        ctx.decode(pykv.Batch(said, seq_id=seq_id))
        for _ in range(8):
            said.append(int(ctx.logits[-1].argmax()))
            ctx.decode(pykv.Batch(said[-1:], seq_id=seq_id))
        print("The sea is" + model.tokenizer.decode(said))
    ctx.memory.seq_rm(1, 3, -1)  # trim: sequence 1 is the shared beginning again
