"Index builds that are killed or run twice at once: what needs real processes. The rest is tested in `nbs/23_retrieval.ipynb`."
import json, signal, subprocess, sys, time
import numpy as np
import pytest
from cmtrag.retrieval import HashEncoder, Index, MiniLM, RetrievalError, index_for
from cmtrag.sources import Corpus, make_paragraph

BUILD = '''
import sys, time
from cmtrag.retrieval import HashEncoder, Index
from cmtrag.sources import Corpus
class Slow(HashEncoder):
    seen = 0
    def encode_passages(self, ps):
        time.sleep(float(sys.argv[3])); self.seen += len(ps)
        return super().encode_passages(ps)
enc = Slow(32)
Index.build(Corpus.load(sys.argv[1]), enc, sys.argv[2], shard=20, progress=lambda it, **kw: it)
print(enc.seen)
'''

def start(corpus_file, folder, pause):
    return subprocess.Popen([sys.executable, '-c', BUILD, str(corpus_file), str(folder), str(pause)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

def make(tmp_path, n=200):
    corpus = Corpus(make_paragraph(f'title {i}', f'text number {i}') for i in range(n))
    return corpus, corpus.save(tmp_path/'corpus.jsonl')

def done(folder):
    try: return json.loads((folder/'manifest.json').read_text())['done']
    except FileNotFoundError: return 0

def test_killed_build_goes_on(tmp_path):
    corpus,file = make(tmp_path)
    folder = tmp_path/'index'
    p = start(file, folder, .3)
    end = time.monotonic()+60
    while done(folder) < 60 and p.poll() is None and time.monotonic() < end: time.sleep(.02)
    p.send_signal(signal.SIGKILL); p.communicate()
    n = done(folder)
    assert 60 <= n < 200, p.returncode
    before = np.array(np.load(folder/'embeddings.npy'))[:n]
    out,err = start(file, folder, 0).communicate(timeout=60)
    assert int(out) == 200-n, err
    index = Index.open(folder, HashEncoder(32), corpus)
    assert np.array_equal(index.vectors[:n], before)
    assert np.array_equal(index.vectors, Index.build(corpus, HashEncoder(32)).vectors)

def test_two_builds_at_once_do_the_work_once(tmp_path):
    corpus,file = make(tmp_path)
    both = [start(file, tmp_path/'index', .05) for _ in range(2)]
    seen = sorted(int(p.communicate(timeout=60)[0]) for p in both)
    assert seen == [0, 200]
    assert len(Index.open(tmp_path/'index', HashEncoder(32), corpus)) == 200

# --- vectors that are damaged

class Counting(HashEncoder):
    "Keeps the texts it is asked to encode, and stops after `life` of them."
    def __init__(self, life=10**9): super().__init__(256); self.seen,self.life = [],life
    def encode_passages(self, ps):
        if len(self.seen)+len(ps) > self.life: raise KeyboardInterrupt
        self.seen += [x for _,x in ps]
        return super().encode_passages(ps)

quiet = lambda it, **kw: it

def spoil(folder, how, rows):
    V = np.load(folder/'embeddings.npy', mmap_mode='r+')
    V[rows] = how(V[rows])
    V.flush()

@pytest.mark.parametrize('how', [lambda v: 0*v, lambda v: v*np.nan, lambda v: 1.5*v, lambda v: v+np.float32(1e30)])
def test_damaged_vectors_are_encoded_anew(tmp_path, how):
    corpus,_ = make(tmp_path)
    more = Corpus([*corpus, make_paragraph('one', 'more')])
    fresh = Index.build(more, HashEncoder(256)).vectors
    old = Index.build(corpus, Counting(), tmp_path/'old', quiet)
    del old
    spoil(tmp_path/'old', how, slice(50, 90))
    enc = Counting()
    new = Index.build(more, enc, tmp_path/'new', quiet, like=tmp_path/'old')
    assert (new.encoded, new.taken_over, len(enc.seen))==(41, 160, 41) and np.array_equal(new.vectors, fresh)
    healed = Index.build(corpus, enc, tmp_path/'old', quiet)     # its own folder
    assert healed.encoded==40 and len(enc.seen)==81 and np.array_equal(healed.vectors, Index.build(corpus, HashEncoder(256)).vectors)
    assert Index.build(corpus, enc, tmp_path/'old', quiet).encoded==0

def test_a_damaged_manifest_says_what_to_delete(tmp_path):
    corpus,_ = make(tmp_path, 5)
    Index.build(corpus, HashEncoder(32), tmp_path/'i', quiet)
    for text in '{', '', '\0\0', '[1]', '{"n": 5}', '['*100000:
        (tmp_path/'i'/'manifest.json').write_text(text)
        for f in lambda: Index.open(tmp_path/'i', HashEncoder(32)), lambda: Index.build(corpus, HashEncoder(32), tmp_path/'i', quiet):
            with pytest.raises(RetrievalError) as e: f()
            assert f'delete the folder {tmp_path/"i"} and build' in str(e.value)

# --- more than one index to take from

def test_all_siblings_serve(tmp_path):
    "An index of an earlier state, and a build that was stopped: both have vectors that the next state needs."
    ps = [make_paragraph(f'title {i}', f'text number {i}') for i in range(700)]
    index_for(Corpus(ps[:200]), Counting(), tmp_path, quiet)
    with pytest.raises(KeyboardInterrupt): index_for(Corpus(ps), Counting(300), tmp_path, quiet)
    index_for(Corpus(ps[600:]), Counting(), tmp_path, quiet, like=None)
    left = [json.loads(f.read_text()) for f in tmp_path.glob('*/manifest.json')]
    enc = Counting()
    got = index_for(Corpus(ps[1:]+[make_paragraph('an', 'edit')]), enc, tmp_path, quiet)
    assert len(left)==3 and got.encoded==len(enc.seen) < 300 and got.encoded+got.taken_over==700
    known = {p for f in tmp_path.glob('*/ids.json') if f.parent.name.split('-')[-1] != got.manifest['corpus'] for p in json.loads(f.read_text())[:json.loads((f.parent/'manifest.json').read_text())['done']]}
    assert got.encoded==len({*got.ids}-known), 'what any of them has is taken over'
    assert np.array_equal(got.vectors, Index.build(Corpus(ps[1:]+[make_paragraph('an', 'edit')]), HashEncoder(256)).vectors)

# --- text is data, and what is cut is said

def test_special_tokens_in_documents_and_questions_are_text(tmp_path):
    enc = MiniLM()
    special = {*enc._q.tok.all_special_ids}-{enc._q.tok.unk_token_id}
    for s in 'What is [SEP] for?', '[CLS][PAD] [MASK]', 'a [SEP] b [SEP] c':
        ids = enc._q._tokens([s])[0]
        assert not special & {*ids[1:-1]} and special > {ids[0], ids[-1]}
    plain = 'Who founded the label?\nIt was founded by Morris Levy, in London (1925).'
    assert enc._q._tokens([plain])==enc._q.tok([plain])['input_ids']
    assert abs(enc.encode_query('x '*20+'[PAD] '*9)@enc.encode_query('x '*20)) < .999, 'it is no padding'

def test_how_many_are_cut_is_said(tmp_path):
    corpus,lines = Corpus([make_paragraph('a', 'word '*400), make_paragraph('b', 'word')]),[]
    index = index_for(corpus, MiniLM(), tmp_path, lambda it, total, desc: lines.append(desc) or it)
    assert index.truncated==1 and '1 paragraphs cut' in repr(index) and '1 paragraphs cut' in index._repr_markdown_()
    assert lines==['1 of 2 paragraphs are longer than minilm reads, and are found by their beginning']
    lines.clear()
    assert index_for(corpus, MiniLM(), tmp_path, lambda it, total, desc: lines.append(desc) or it).truncated==1 and not lines
