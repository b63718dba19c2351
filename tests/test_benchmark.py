"The benchmark as a user builds it: papermill, wrong parameters, a realizer that does not answer, real question files, and what others load."
import json, os
from pathlib import Path

import pytest

from cmtrag.dataset import load_mumuqa
from test_eval import ROOT, last_line, papermill

BUILD,TABLE5 = ROOT/'nbs'/'41_mumuqa.ipynb',ROOT/'nbs'/'55_table5.ipynb'
DATA = os.environ.get('CMTRAG_DATA')

@pytest.mark.parametrize('nb,args,says', [(BUILD, ['-p','source','/nowhere.jsonl'], ['/nowhere.jsonl', 'no such file']), (BUILD, ['-p','realizer','ruels'], ['ruels', 'rules', 'gpt-oss-120b']),
                                          (BUILD, ['-p','relocated','1.5'], ['relocated', 'between 0 and 1']), (TABLE5, ['-p','data','/nowhere'], ['data', 'nbs/41_mumuqa.ipynb'])])
def test_wrong_parameters(tmp_path, nb, args, says):
    rc,out = papermill(tmp_path, *args, nb=nb)
    assert rc!=0
    assert all(s in out for s in says), out[-2000:]

def test_a_dead_realizer_is_said_before_anything_is_built(tmp_path):
    home = tmp_path/'home'
    home.mkdir()
    rc,out = papermill(tmp_path, '-p','realizer','gpt-oss-120b', nb=BUILD, home=home, CMTRAG_REALIZER_URL='http://127.0.0.1:9/v1')
    assert rc!=0 and 'CMTRAG_REALIZER_URL' in out and 'openai/gpt-oss-120b' in out, out[-2000:]
    assert not (home/'outputs').exists()

@pytest.fixture(scope='module')
def built(tmp_path_factory):
    "A small benchmark of the sample world, built once with one process and once with two."
    tmp = tmp_path_factory.mktemp('built')
    home = tmp/'home'
    home.mkdir()
    outs = [papermill(tmp, '-p','scale','.01', '-p','workers',w, nb=BUILD, home=home) for w in ('1','2')]
    for rc,out in outs: assert rc==0, out[-3000:]
    return home,[last_line(out, 'run id') for _,out in outs]

def test_one_or_two_processes_make_the_same_run(built):
    home,(a,b) = built
    assert a==b and len(list((home/'outputs'/'41_mumuqa').iterdir()))==1

def test_a_folder_that_the_tables_read(built, tmp_path):
    home,(id,_) = built
    folder = home/'outputs'/'41_mumuqa'/id/'mumuqa'
    mq = load_mumuqa(folder)
    rc,out = papermill(tmp_path, '-p','data',str(folder), nb=TABLE5, home=home)
    assert rc==0, out[-3000:]
    made = json.loads((home/'outputs'/'55_table5'/last_line(out, 'run id')/'metrics.json').read_text())
    short = mq.splits['short train']+mq.splits['short dev']
    assert sum(r['turns'] for r in made['cases'])==sum(len(d.turns) for d in short)

def test_another_library_reads_the_folder(built, tmp_path, monkeypatch):
    datasets = pytest.importorskip('datasets')
    home,(id,_) = built
    folder = home/'outputs'/'41_mumuqa'/id/'mumuqa'
    mq = load_mumuqa(folder)
    kinds = list(dict.fromkeys(k.split()[0] for k in mq.splits))
    assert {'short', 'long', 'single'} <= set(kinds)
    for kind in kinds:
        got = datasets.load_dataset(str(folder), kind, cache_dir=str(tmp_path))
        assert {f'{kind} {s}': len(d) for s,d in got.items()}=={k: len(v) for k,v in mq.splits.items() if k.startswith(kind)}
    row = datasets.load_dataset(str(folder), 'short', cache_dir=str(tmp_path))['train'][0]
    assert row['turns'][0]['query']==mq.splits['short train'][0].turns[0].query

@pytest.mark.skipif(not DATA, reason='CMTRAG_DATA is not set')
def test_real_questions(tmp_path):
    home = tmp_path/'home'
    home.mkdir()
    files = ','.join(str(Path(DATA)/'musique'/f'{n}.jsonl') for n in ('musique_ans_dev_gold_only', 'musique_ans_dev_200'))
    rc,out = papermill(tmp_path, '-p','source',files, '-p','scale','.06', '-p','single','false', nb=BUILD, home=home)
    assert rc==0, out[-3000:]
    id = last_line(out, 'run id')
    m = json.loads((home/'outputs'/'41_mumuqa'/id/'metrics.json').read_text())
    assert m['used']>=.5*m['questions'] and m['giveaways']==0
    assert m['shared']['titles']==0 and m['shared']['bridges']==0
