import emulated_torch as E, torch, numpy as np
from simulated_cupy import simulated
def test_x():
    torch.manual_seed(0)
    m=torch.nn.Sequential(torch.nn.Conv2d(1,4,3),torch.nn.BatchNorm2d(4),torch.nn.ReLU(),torch.nn.Flatten(),torch.nn.Linear(4*36,10))
    import copy
    m2=copy.deepcopy(m)
    x=torch.randn(5,1,8,8);y=torch.arange(5)
    from cpdhpc.train.reducer import GradientReducer
    from cpdhpc.world.ranks import Loopback
    def go(m,x,y,**k):
        r=GradientReducer(m,Loopback(),"lowbit",wire="e4m3",scaling="aps",error_feedback=True,bucket_mib=1e-4,**k)
        o=torch.optim.SGD(m.parameters(),lr=.1,momentum=.9)
        for i in range(3):
            o.zero_grad()
            l=torch.nn.functional.cross_entropy(m(x),y)
            l.backward(torch.full_like(l,1.0)); r.reduce(); o.step()
        r.close()
        return float(l.detach())
    l0=go(m,x,y)
    for over in (False,True):
        with simulated() as (gpu,cupy), E.cuda(gpu):
            m3=copy.deepcopy(m2).to("cuda:0")
            l=go(m3,x.to("cuda:0"),y.to("cuda:0"),overlap=over)
            got=[p.detach().cpu() for p in m3.parameters()]
        assert l==l0
        assert all(torch.equal(a,b) for a,b in zip(got,m.parameters()))
