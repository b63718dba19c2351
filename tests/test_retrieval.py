"Index builds that are killed or run twice at once: what needs real processes. The rest is tested in `nbs/23_retrieval.ipynb`."
import json, signal, subprocess, sys, time
import numpy as np
from cmtrag.retrieval import HashEncoder, Index
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
