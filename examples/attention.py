import pykv
from pykv.cli.catalog import model_path

with pykv.Model.load(model_path("smollm2-135m")) as model, model.context(n_ctx=512) as ctx:
    said = model.tokenizer.encode("Alice has a red hat and Bob has a blue one. The colour of Alice's hat is")
    with ctx.observe(what=pykv.AttentionMass(last=1)) as observer:
        ctx.decode(pykv.Batch(said))
        (seen,) = observer
    mass = sum(seen.mass.values())  # what the last token gave to each cell, over all layers and heads
    for cell in mass.argsort()[:-7:-1]:
        print(f"{mass[cell] / mass.sum():4.0%} {model.tokenizer.decode(said[seen.pos[cell] :][:1])!r}")
