import pykv
from pykv.cli.catalog import model_path

with pykv.Model.load(model_path("smollm2-135m")) as model, model.context(n_ctx=512, n_seq_max=2) as ctx:
    memory = ctx.memory
    ctx.decode(pykv.Batch(model.tokenizer.encode("One two three four five six seven eight"), logits="none"))
    memory.seq_cp(0, 1)  # sequence 1 shares all cells
    memory.seq_rm(0, 2, 5)  # sequence 0 forgets positions 2 to 4
    memory.seq_add(0, 5, -1, -3)  # and closes the gap; sequence 1 keeps its cells as they are
    print(memory.dump())  # cell:position{sequences}
    print(memory.visible(0, 3))  # the positions that a query of sequence 0 at 3 attends to
    print(memory.k(0, seq_id=0).shape)  # keys of layer 0 in order of position, float32
