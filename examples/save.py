import pykv
from pykv.cli.catalog import model_path

with pykv.Model.load(model_path("smollm2-135m")) as model:
    tokens = model.tokenizer.encode("Once upon a time, there was a fox who")
    with model.context(n_ctx=512, n_seq_max=2) as ctx:
        ctx.decode(pykv.Batch(tokens, logits="none"))
        whole_prompt = ctx.state_bytes(0, partial=True)  # bytes to go back to, where a cut alone cannot
        ctx.save_sequence("fox.ggsq", 0, tokens, extra={"title": "the fox"}, attachments={"prompt": whole_prompt})
    with model.context(n_ctx=1024, n_seq_max=4) as ctx:
        tokens = ctx.load_sequence("fox.ggsq", seq_id=3)  # beside whatever the other sequences hold
        print(f"{len(tokens)} tokens back, the next one is at {ctx.memory.pos_max(3) + 1}")

with pykv.open_state("fox.ggsq") as saved:  # needs no model; attachments are mapped, not read into memory
    print(saved.extra["title"], saved.tokens, saved.attachments["prompt"].nbytes)
